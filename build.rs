//! Compiles `kernels/*.cu` to one sm_90a cubin each and writes the table of them that the crate embeds.
//!
//! nvcc, of CUDA 12.8 or later, is looked for in `FERROMLA_NVCC`, `CUDA_HOME` and `CUDA_PATH`, the pip toolkit (`nvidia-cuda-nvcc`) of
//! the Python interpreter at work, `PATH`, and `/usr/local/cuda`. Without it the table is empty and says why;
//! with `FERROMLA_REQUIRE_CUDA=1` that is a build error. A spill, a stack frame or a serialised `wgmma` in an
//! attention kernel is a warning, for such a kernel works and is slower; with `FERROMLA_STRICT=1`, which the Makefile sets, it is an
//! error. What ptxas said is in `OUT_DIR/ptxas.txt`. `FERROMLA_WITHOUT_KERNELS=1` leaves the table empty: lints need no kernels.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::SystemTime;

/// The release of nvcc that the kernels are made for and measured with, ...
pub const RELEASE: (i32, i32) = (13, 3);
/// ... and the oldest that knows all their instructions.
const OLDEST_RELEASE: (i32, i32) = (12, 8);
#[rustfmt::skip]
const FLAGS: [&str; 6] =
    ["-std=c++17", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-cubin", "-Xptxas=-v"];
#[rustfmt::skip]
const VARIABLES: [&str; 10] = [
    "FERROMLA_NVCC", "FERROMLA_REQUIRE_CUDA", "FERROMLA_STRICT", "FERROMLA_WITHOUT_KERNELS", "CUDA_HOME", "CUDA_PATH",
    "PYO3_PYTHON", "PYTHON_SYS_EXECUTABLE", "VIRTUAL_ENV", "PATH",
];

type Result<T> = std::result::Result<T, String>;

fn main() {
    if let Err(error) = build() {
        warn(&error);
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn warn(text: &str) {
    for line in text.lines() {
        println!("cargo:warning={line}");
    }
}

fn build() -> Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=kernels");
    for variable in VARIABLES {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: run by cargo only")?);
    let without = |reason: &str| write_table(&out, &[], (0, 0), Some(reason));
    if !has_feature("CUDA") {
        return without("built without the feature `cuda`");
    }
    if is_set("FERROMLA_WITHOUT_KERNELS") {
        return without("built with FERROMLA_WITHOUT_KERNELS");
    }
    let Some(nvcc) = find_nvcc()? else {
        let missing = missing();
        if is_set("FERROMLA_REQUIRE_CUDA") {
            return Err(format!(
                "FERROMLA_REQUIRE_CUDA is set and {missing}: set FERROMLA_NVCC or CUDA_HOME"
            ));
        }
        return without(&without_nvcc(&missing));
    };
    let sources = sources()?;
    let said = version(&nvcc);
    let images = compile_all(&nvcc, &said, &sources, &out)?;
    let mut report = format!("{}\n", nvcc.display());
    for image in &images {
        report += &format!("\n== {}\n{}", image.name, image.report);
    }
    write_if_changed(&out.join("ptxas.txt"), &report)?;
    let release = release(&said).unwrap_or_default();
    if let Some(slow) = slow(&images, release) {
        if is_set("FERROMLA_STRICT") {
            return Err(slow);
        }
        warn(&slow);
    }
    let names: Vec<_> = images.into_iter().map(|image| image.name).collect();
    let reason = names
        .is_empty()
        .then_some("this build of ferromla found no kernels/*.cu");
    write_table(&out, &names, release, reason)
}

fn is_set(variable: &str) -> bool {
    env::var(variable).is_ok_and(|value| !value.is_empty() && value != "0")
}

fn has_feature(name: &str) -> bool {
    env::var_os(format!("CARGO_FEATURE_{name}")).is_some()
}

/// The kernels this build wants.
fn sources() -> Result<Vec<PathBuf>> {
    let directory = fs::read_dir("kernels").map_err(|error| format!("kernels: {error}"))?;
    let mut sources: Vec<_> = directory.flatten().map(|entry| entry.path()).collect();
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "cu"));
    sources.retain(|path| has_feature("FP16") || !stem(path).ends_with("_fp16"));
    sources.sort();
    Ok(sources)
}

fn stem(path: &Path) -> String {
    path.file_stem()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

// ---- finding nvcc ----

fn missing() -> String {
    let (major, minor) = OLDEST_RELEASE;
    format!("nvcc of CUDA {major}.{minor} or later was not found")
}

/// What a build without kernels says when they are asked for. cargo does not see that an nvcc has come, but it sees
/// that a variable has changed.
pub fn without_nvcc(missing: &str) -> String {
    let (major, minor) = RELEASE;
    format!(
        "this build of ferromla has no CUDA kernels, because {missing} when it was built: install a CUDA toolkit \
         (or `pip install 'nvidia-cuda-nvcc=={major}.{minor}.*' 'nvidia-nvvm=={major}.{minor}.*' \
         'nvidia-cuda-crt=={major}.{minor}.*' nvidia-cuda-cccl`), point FERROMLA_NVCC or CUDA_HOME at it if it is not found by itself, \
         and build again with FERROMLA_REQUIRE_CUDA=1"
    )
}

fn find_nvcc() -> Result<Option<PathBuf>> {
    let variable = |name| {
        env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let watch = |nvcc: &Path| println!("cargo:rerun-if-changed={}", nvcc.display());
    if let Some(nvcc) = variable("FERROMLA_NVCC") {
        let (major, minor) = OLDEST_RELEASE;
        let fault = format!(
            "FERROMLA_NVCC is {}, which does not run or is older than {major}.{minor}",
            nvcc.display()
        );
        let nvcc = first_that_serves([nvcc], watch);
        return nvcc.map(Some).ok_or(fault);
    }
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable);
    let toolkits = toolkits.map(|root| root.join("bin/nvcc"));
    let pip = interpreters()
        .into_iter()
        .filter_map(|python| pip_nvcc(&python));
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).map(|folder| folder.join("nvcc"));
    let candidates = toolkits.chain(pip).chain(on_path);
    let candidates = candidates.chain(["/usr/local/cuda/bin/nvcc".into()]);
    Ok(first_that_serves(candidates, watch))
}

/// The first that serves. It and the files that are passed over are watched: another in their place is another nvcc. Paths
/// without a file are not, for cargo builds anew each time while one that is watched is missing.
pub fn first_that_serves(
    candidates: impl IntoIterator<Item = PathBuf>,
    mut watch: impl FnMut(&Path),
) -> Option<PathBuf> {
    candidates.into_iter().find(|nvcc| {
        if nvcc.is_file() {
            watch(nvcc);
        }
        serves(nvcc)
    })
}

/// Whether it runs and knows all instructions of the kernels.
fn serves(nvcc: &Path) -> bool {
    release(&version(nvcc)) >= Some(OLDEST_RELEASE)
}

/// What `nvcc --version` says; nothing where it does not run.
fn version(nvcc: &Path) -> String {
    let output = Command::new(nvcc).arg("--version").output().ok();
    let output = output.filter(|output| output.status.success());
    output.map_or_else(String::new, |output| {
        String::from_utf8_lossy(&output.stdout).into_owned()
    })
}

/// The release in what `nvcc --version` says: 13 and 0 of `release 13.0,`.
pub fn release(said: &str) -> Option<(i32, i32)> {
    let (_, rest) = said.split_once("release ")?;
    let (major, rest) = rest.split_once('.')?;
    let digits = rest.find(|c: char| !c.is_ascii_digit())?;
    Some((major.parse().ok()?, rest[..digits].parse().ok()?))
}

/// The Python interpreters that may carry the pip toolkit: maturin names its own, under build isolation too.
fn interpreters() -> Vec<PathBuf> {
    let mut interpreters: Vec<PathBuf> = ["PYO3_PYTHON", "PYTHON_SYS_EXECUTABLE"]
        .iter()
        .filter_map(env::var_os)
        .map(PathBuf::from)
        .collect();
    if let Some(environment) = env::var_os("VIRTUAL_ENV") {
        interpreters.push(Path::new(&environment).join("bin/python"));
    }
    interpreters.push("python3".into());
    interpreters
}

fn pip_nvcc(python: &Path) -> Option<PathBuf> {
    let output = Command::new(python)
        .args(["-c", "import nvidia; print('\\n'.join(nvidia.__path__))"])
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.lines()
        .map(|root| Path::new(root).join("cu13/bin/nvcc"))
        .find(|nvcc| nvcc.is_file())
}

// ---- compiling ----

/// A compiled kernel file.
pub struct Image {
    /// Its stem.
    pub name: String,
    /// What ptxas said of it.
    pub report: String,
}

/// Runs as many compilers at once as cargo has jobs. `said`: nvcc, of its version.
fn compile_all(nvcc: &Path, said: &str, sources: &[PathBuf], out: &Path) -> Result<Vec<Image>> {
    let jobs: usize = env::var("NUM_JOBS").map_or(1, |jobs| jobs.parse().unwrap_or(1));
    let next = Mutex::new(sources.iter());
    let images = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, sources.len().max(1)) {
            scope.spawn(|| {
                loop {
                    let Some(source) = next.lock().unwrap().next() else {
                        break;
                    };
                    let image = compile(nvcc, said, source, out); // with no lock held
                    images.lock().unwrap().push(image);
                }
            });
        }
    });
    let mut images = images
        .into_inner()
        .unwrap()
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    images.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(images)
}

fn compile(nvcc: &Path, said: &str, source: &Path, out: &Path) -> Result<Image> {
    let name = stem(source);
    let [cubin, depfile, stamp] =
        ["cubin", "d", "stamp"].map(|kind| out.join(format!("{name}.{kind}")));
    let read = |path: &Path| {
        fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
    };
    // cargo runs this script when a variable that may name nvcc changes: the same compiler and the same
    // sources give the same image.
    let compiler = format!("{said} {FLAGS:?}\n");
    let report = match current(out, &name, &compiler).or_else(|| take_over(out, &name, &compiler)) {
        Some(report) => report,
        None => {
            let report = run_nvcc(nvcc, source, &cubin, &depfile)?;
            fs::write(&stamp, compiler + &report)
                .map_err(|error| format!("{}: {error}", stamp.display()))?;
            report
        }
    };
    for header in dependencies(&read(&depfile)?) {
        println!("cargo:rerun-if-changed={header}");
    }
    Ok(Image { name, report })
}

/// What ptxas said of the image in this folder, if it is there, of this compiler, and newer than its sources. The stamp
/// is written last.
fn current(folder: &Path, name: &str, compiler: &str) -> Option<String> {
    let [cubin, depfile, stamp] =
        ["cubin", "d", "stamp"].map(|kind| folder.join(format!("{name}.{kind}")));
    let report = fs::read_to_string(&stamp)
        .ok()?
        .strip_prefix(compiler)?
        .to_owned();
    let finished = modified(&stamp)? >= modified(&cubin)?;
    (finished && is_newer(&cubin, &fs::read_to_string(depfile).ok()?)).then_some(report)
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|data| data.modified()).ok()
}

/// Copies a current image from what this crate was built for with other features, beside this build's folder.
fn take_over(out: &Path, name: &str, compiler: &str) -> Option<String> {
    let builds = out.parent()?.parent()?;
    let others = fs::read_dir(builds)
        .ok()?
        .flatten()
        .map(|entry| entry.path().join("out"));
    for folder in others.filter(|folder| folder != out) {
        let Some(report) = current(&folder, name, compiler) else {
            continue;
        };
        let copied = ["d", "cubin", "stamp"].map(|kind| {
            let file = format!("{name}.{kind}");
            fs::copy(folder.join(&file), out.join(&file))
        });
        if copied.iter().all(|copy| copy.is_ok()) {
            return Some(report);
        }
    }
    None
}

/// Whether the file is newer than all it was made from.
fn is_newer(file: &Path, rules: &str) -> bool {
    let Some(made) = modified(file) else {
        return false;
    };
    dependencies(rules)
        .iter()
        .all(|source| modified(Path::new(source)).is_some_and(|changed| changed < made))
}

fn run_nvcc(nvcc: &Path, source: &Path, cubin: &Path, depfile: &Path) -> Result<String> {
    let mut command = Command::new(nvcc);
    command
        .args(FLAGS)
        .arg("-MD")
        .arg("-MF")
        .arg(depfile)
        .arg("-o")
        .arg(cubin)
        .arg(source);
    let output = command
        .output()
        .map_err(|error| format!("{}: {error}", nvcc.display()))?;
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        return Ok(said.into_owned());
    }
    Err(format!("{} does not compile:\n{said}", source.display()))
}

/// The files of a make rule `target: file file \ file`, in which names have their spaces behind a backslash.
pub fn dependencies(rules: &str) -> BTreeSet<String> {
    let rules = rules.replace("\\\n", " ");
    let Some((_, files)) = rules.split_once(": ") else {
        return BTreeSet::new();
    };
    let files = files.replace("\\ ", "\0");
    let names = files.split_whitespace();
    names.map(|name| name.replace('\0', " ")).collect()
}

/// What to say of kernels that are slower than they are made to be.
pub fn slow(images: &[Image], (major, minor): (i32, i32)) -> Option<String> {
    let faults: Vec<_> = images.iter().flat_map(faults).collect();
    let listed = faults.join("\n");
    (!faults.is_empty())
        .then(|| format!("nvcc {major}.{minor} makes slow attention kernels:\n{listed}"))
}

/// What must not happen in an attention kernel, from the words of ptxas: local memory, and the notes that
/// `wgmma` was serialised, for whichever reason, or `setmaxnreg` ignored.
pub fn faults(Image { name, report }: &Image) -> Vec<String> {
    if !name.starts_with("decode") {
        return Vec::new();
    }
    let mut function = "";
    let mut faults = Vec::new();
    for line in report.lines() {
        if let Some((_, rest)) = line.split_once("Function properties for ") {
            function = rest.trim();
        }
        let local = line.contains("bytes stack frame") && line.split_whitespace().any(is_positive);
        let noted = line.contains("Potential Performance Loss") || line.contains("C7508");
        if local || noted {
            faults.push(format!("kernels/{name}.cu: {function}: {}", line.trim()));
        }
    }
    faults
}

fn is_positive(word: &str) -> bool {
    word.parse::<u64>().is_ok_and(|number| number > 0)
}

/// `release`: nvcc's.
fn write_table(
    out: &Path,
    names: &[String],
    release: (i32, i32),
    reason: Option<&str>,
) -> Result<()> {
    let mut table = String::from("pub(super) static IMAGES: &[Image] = &[\n");
    for name in names {
        let bytes = format!("include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.cubin\"))");
        table += &format!(
            "    Image {{ name: {name:?}, cubin: {{ static A: &Aligned<[u8]> = &Aligned(*{bytes}); &A.0 }} }},\n"
        );
    }
    table += &format!("];\npub(super) const WITHOUT_KERNELS: Option<&str> = {reason:?};\n");
    table += &format!("pub(super) const RELEASE: (i32, i32) = {release:?};\n");
    write_if_changed(&out.join("images.rs"), &table)
}

/// Leaves an unchanged file alone, so that what depends on it is not built again.
fn write_if_changed(path: &Path, text: &str) -> Result<()> {
    if fs::read_to_string(path).is_ok_and(|current| current == text) {
        return Ok(());
    }
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}
