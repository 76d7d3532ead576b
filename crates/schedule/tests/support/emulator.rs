//! Compiles `kernels/plan.cu` by g++ over the emulated GPU of `tests/emulator`, and runs it.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The plans of cases, one after another: `emulated_planner.cpp` says what a case is.
pub fn run(cases: Vec<u8>) -> Vec<i32> {
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (input, output) = (scratch.join("cases.bin"), scratch.join("plans.bin"));
    std::fs::write(&input, cases).unwrap();
    let run = Command::new(compile(scratch))
        .arg(&input)
        .arg(&output)
        .arg("1")
        .output()
        .unwrap();
    assert!(
        run.status.success(),
        "{}: {}",
        run.status,
        String::from_utf8_lossy(&run.stderr)
    );
    let plans = std::fs::read(&output).unwrap();
    plans
        .chunks_exact(4)
        .map(|word| i32::from_ne_bytes(word.try_into().unwrap()))
        .collect()
}

/// g++ is a requirement of the build: without it this fails. Undefined behaviour traps.
fn compile(scratch: &Path) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let program = scratch.join("emulated_planner");
    // As `tests/emulator/build.py` does it: instructions of the GPU are the emulator's.
    let sources = scratch.join("kernels");
    let (kernels, emulated) = (root.join("kernels"), root.join("tests/emulator/ptx"));
    let _ = std::fs::remove_dir_all(&sources); // an old file must not be found
    copy_folder(&kernels, &sources);
    copy_folder(&emulated, &sources.join("ptx"));
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "g++".into());
    let output = Command::new(&compiler)
        .args([
            "-std=c++17",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unknown-pragmas",
        ])
        .args(["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"])
        .arg("-U_FORTIFY_SOURCE")
        .arg("-I")
        .arg(&sources)
        .arg("-I")
        .arg(root.join("tests/emulator"))
        .arg("-o")
        .arg(&program)
        .arg(tests.join("emulated_planner.cpp"))
        .output()
        .unwrap_or_else(|error| panic!("{compiler:?} is needed to compile the planner: {error}"));
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    program
}

/// Files that are there are replaced.
fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let (from, to) = {
            let entry = entry.unwrap();
            (entry.path(), to.join(entry.file_name()))
        };
        if from.is_dir() {
            copy_folder(&from, &to);
        } else {
            std::fs::copy(&from, &to).unwrap();
        }
    }
}
