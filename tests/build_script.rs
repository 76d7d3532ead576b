//! What the build script reads out of the words of its tools.

#[allow(dead_code)]
#[path = "../build.rs"]
mod build;

use std::fs;
use std::os::unix::fs::PermissionsExt;

use build::{Image, RELEASE, dependencies, faults, release, serves};

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

#[test]
fn an_nvcc_that_lacks_instructions_or_does_not_run_is_passed_over() {
    let nvcc = std::env::temp_dir().join(format!("ferromla-nvcc-{}", std::process::id()));
    let serves_if_it = |script: &str| {
        fs::write(&nvcc, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&nvcc, fs::Permissions::from_mode(0o755)).unwrap();
        serves(&nvcc)
    };
    let says = |release| format!("echo Cuda compilation tools, release {release}, V{release}.1");
    for (release, served) in [
        ("11.8", false),
        ("12.6", false),
        ("12.8", true),
        ("12.10", true),
        ("13.0", true),
    ] {
        assert_eq!(serves_if_it(&says(release)), served, "{release}");
    }
    assert!(!serves_if_it(&format!("{}; exit 1", says("13.3"))));
    fs::remove_file(&nvcc).unwrap();
    assert!(!serves(&nvcc));
}

#[test]
fn builds_bring_the_nvcc_whose_spills_are_errors() {
    let (major, minor) = RELEASE;
    let asked = format!("\"nvidia-cuda-nvcc=={major}.{minor}.*;");
    assert!(
        include_str!("../pyproject.toml").contains(&asked),
        "{asked}"
    );
}
