//! What the build script reads out of the words of its tools.

#[allow(dead_code)]
#[path = "../build.rs"]
mod build;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use build::{Image, RELEASE, dependencies, faults, first_that_serves, release, slow, without_nvcc};

const CLEAN: &str = "\
ptxas info    : Compiling entry function 'fm_decode_bf16_576_tma' for 'sm_90a'
ptxas info    : Function properties for fm_decode_bf16_576_tma
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers
";

fn faults_of(name: &str, report: String) -> Vec<String> {
    faults(&Image {
        name: name.to_owned(),
        report,
    })
}

#[test]
fn a_clean_kernel_passes() {
    assert!(faults_of("decode_bf16", CLEAN.to_owned()).is_empty());
}

#[test]
fn local_memory_in_an_attention_kernel_is_named() {
    for (from, to) in [
        ("0 bytes stack", "8 bytes stack"),
        ("0 bytes spill stores", "16 bytes spill stores"),
        ("0 bytes spill loads", "16 bytes spill loads"),
    ] {
        let report = CLEAN.replace(from, to);
        let faults = faults_of("decode_bf16", report.clone());
        assert_eq!(faults.len(), 1);
        assert!(
            faults[0].contains("fm_decode_bf16_576_tma") && faults[0].contains(to),
            "{faults:?}"
        );
        assert!(
            faults_of("plan", report).is_empty(),
            "only attention kernels must not spill"
        );
    }
}

#[test]
fn serialised_wgmma_and_ignored_setmaxnreg_are_named() {
    for note in [
        "(C7510) Potential Performance Loss",
        "(C7512) Potential Performance Loss",
        "(C7515) Potential Performance Loss",
        "(C7518) Potential Performance Loss",
        "(C7508) setmaxnreg is ignored",
    ] {
        let report = format!("ptxas info    : {note} in the function\n{CLEAN}");
        assert_eq!(faults_of("decode_fp16", report).len(), 1);
    }
}

#[test]
fn a_depfile_names_sources_and_headers() {
    let rules = "/out/plan.cubin : kernels/plan.cu \\\n    kernels/params.h \\\n    /usr/include/stdc-predef.h\n";
    let files: Vec<_> = dependencies(rules).into_iter().collect();
    assert_eq!(
        files,
        [
            "/usr/include/stdc-predef.h",
            "kernels/params.h",
            "kernels/plan.cu"
        ]
    );
}

#[test]
fn a_depfile_names_files_whose_paths_have_spaces() {
    let rules = "/my\\ out/plan.cubin : kernels/plan.cu \\\n    /a\\ tool\\ kit/cu13/bin/../include/cuda.h \\\n    /usr/limits.h\n";
    let files: Vec<_> = dependencies(rules).into_iter().collect();
    assert_eq!(
        files,
        [
            "/a tool kit/cu13/bin/../include/cuda.h",
            "/usr/limits.h",
            "kernels/plan.cu"
        ]
    );
}

#[test]
fn the_release_is_read_from_what_nvcc_says() {
    let said = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0/compiler\n";
    assert_eq!(release(said), Some((13, 0)));
    assert_eq!(release("release 12.10, V12.10.4"), Some((12, 10)));
    for other in [
        "another program",
        "",
        "release 13",
        "release 13.",
        "release a.b,",
    ] {
        assert_eq!(release(other), None, "{other}");
    }
}

/// A folder of programs, removed when dropped.
struct Programs(PathBuf);

impl Programs {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("ferromla-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    /// A program that is this shell script.
    fn write(&self, name: &str, script: &str) -> PathBuf {
        let program = self.0.join(name);
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        program
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// The script of an nvcc of this release.
fn of_release(release: &str) -> String {
    format!("echo Cuda compilation tools, release {release}, V{release}.1")
}

fn serves(nvcc: &Path) -> bool {
    first_that_serves([nvcc.to_owned()], |_| ()).is_some()
}

#[test]
fn an_nvcc_that_lacks_instructions_or_does_not_run_is_passed_over() {
    let programs = Programs::new("serves");
    for (release, served) in [
        ("11.8", false),
        ("12.6", false),
        ("12.8", true),
        ("12.10", true),
        ("13.0", true),
    ] {
        let nvcc = programs.write("nvcc", &of_release(release));
        assert_eq!(serves(&nvcc), served, "{release}");
    }
    let failing = format!("{}; exit 1", of_release("13.3"));
    assert!(!serves(&programs.write("nvcc", &failing)));
    assert!(!serves(&programs.0.join("missing")));
}

#[test]
fn compilers_that_were_looked_at_are_watched_and_no_missing_files() {
    let programs = Programs::new("watched");
    let old = programs.write("old", &of_release("12.6"));
    let good = programs.write("good", &of_release("13.3"));
    let later = programs.write("later", &of_release("13.4"));
    let candidates = [programs.0.join("missing"), old.clone(), good.clone(), later];
    let mut watched = Vec::new();
    let found = first_that_serves(candidates, |nvcc| watched.push(nvcc.to_owned()));
    assert_eq!(found, Some(good.clone()));
    assert_eq!(watched, [old, good]);
}

#[test]
fn a_build_without_nvcc_says_what_makes_cargo_look_for_it_again() {
    let said = without_nvcc("nvcc was not found");
    assert!(
        said.ends_with("build again with FERROMLA_REQUIRE_CUDA=1"),
        "{said}"
    );
}

#[test]
fn slow_kernels_are_listed_with_their_compiler() {
    let image = |report: &str| Image {
        name: "decode_bf16".to_owned(),
        report: report.to_owned(),
    };
    assert_eq!(slow(&[image(CLEAN)], (13, 3)), None);
    let spills = CLEAN.replace("0 bytes spill stores", "16 bytes spill stores");
    let said = slow(&[image(CLEAN), image(&spills)], (13, 3)).unwrap();
    assert!(
        said.starts_with("nvcc 13.3 makes slow attention kernels:\nkernels/decode_bf16.cu"),
        "{said}"
    );
}

#[test]
fn builds_bring_the_nvcc_that_the_kernels_are_made_for() {
    let (major, minor) = RELEASE;
    let asked = format!("\"nvidia-cuda-nvcc=={major}.{minor}.*;");
    assert!(
        include_str!("../pyproject.toml").contains(&asked),
        "{asked}"
    );
}

#[test]
fn the_driver_s_bindings_are_those_of_no_nvcc() {
    let manifest = include_str!("../Cargo.toml");
    assert!(manifest.contains("\"cudarc?/cuda-13040\""));
    assert!(!manifest.contains("cuda-version-from-build-system"));
}
