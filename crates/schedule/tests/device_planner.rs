//! The planner of the device writes the plan of the host: `kernels/plan.cu` itself, compiled by g++ over a
//! small emulation of a thread block, against [`plan_into`](ferromla_schedule::plan_into), byte by byte.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use ferromla_schedule::plan_layout::{FM_SPLIT_AUTO, FM_SPLIT_FIXED, FM_SPLIT_INVARIANT};
use ferromla_schedule::{PlanView, layout};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use support::{Case, cases_of, plan};

const CASES_PER_MODE: usize = 100;
/// Elements between two lengths of every second case.
const STRIDE: usize = 3;

#[test]
fn the_device_writes_the_plan_of_the_host() {
    let cases = seeded_cases();
    let plans = emulate(&cases);
    let mut rest = plans.as_slice();
    let (mut cut, mut whole) = (0, 0);
    for (index, case) in cases.iter().enumerate() {
        let ours = plan(case);
        let (theirs, after) = rest
            .split_at_checked(ours.words.len())
            .expect("a plan for every case");
        rest = after;
        assert_same_plan(case, &ours.words, theirs, index);
        cut += usize::from(ours.header.merges > 0);
        whole += usize::from(ours.header.whole != 0);
    }
    assert!(rest.is_empty());
    assert!(
        cut > 50 && whole > 10,
        "the cases are of all kinds: {cut} cut, {whole} whole"
    );
}

/// Equal in the header, worker ranges, merges and items in use. Nothing else is specified.
fn assert_same_plan(case: &Case, ours: &[i32], theirs: &[i32], index: usize) {
    let at = layout(&case.shape).unwrap();
    let plan = PlanView::new(&case.shape, ours).unwrap();
    let context = || format!("case {index}: {case:?}");
    let same = |what: &str, byte_offset: i64, bytes: usize| {
        let words = byte_offset as usize / 4..byte_offset as usize / 4 + bytes / 4;
        assert_eq!(
            ours[words.clone()],
            theirs[words],
            "{what} of {}",
            context()
        );
    };
    same("header", 0, size_of_val(plan.header()));
    same("worker_begin", at.worker_begin, (plan.workers() + 1) * 4);
    same("merges", at.merges, size_of_val(plan.merges()));
    same("items", at.items, size_of_val(plan.items()));
}

fn seeded_cases() -> Vec<Case> {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let mut cases = Vec::new();
    for mode in [FM_SPLIT_AUTO, FM_SPLIT_FIXED, FM_SPLIT_INVARIANT] {
        let strategy = cases_of(mode);
        cases
            .extend((0..CASES_PER_MODE).map(|_| strategy.new_tree(&mut runner).unwrap().current()));
        cases.extend([1023, 1024, 1025, 3072, 3073, 7000].map(|units| many_units(mode, units)));
        cases.push(longest(mode));
    }
    cases
}

/// Around the ends of a round of threads, and of what shared memory holds.
fn many_units(split_mode: i32, units: i32) -> Case {
    let seq_lens = (0..units)
        .map(|i| i.wrapping_mul(0x9e37_79b1_u32 as i32).rem_euclid(30_000))
        .collect();
    let mut case = longest(split_mode);
    case.shape.batch = units;
    case.shape.kv_heads = 1;
    case.shape.max_seq_len = 25_000;
    (
        case.shape.fixed_cost,
        case.shape.split_cost,
        case.shape.min_part,
    ) = (2, 6, 1);
    Case { seq_lens, ..case }
}

/// The longest lengths and costs there are.
fn longest(split_mode: i32) -> Case {
    let shape = ferromla_schedule::PlanShape {
        batch: 500,
        q_len: 1,
        group: 64,
        kv_heads: 4,
        causal: 1,
        unit_rows: 64,
        workers: 132,
        split_mode,
        num_splits: 3,
        max_seq_len: i32::MAX,
        fixed_cost: i32::MAX,
        split_cost: 0,
        min_part: 1 << 20,
        ragged: 0,
        q_tokens: 0,
        whole_speed: 256,
    };
    Case {
        shape,
        seq_lens: vec![i32::MAX; 500],
    }
}

fn emulate(cases: &[Case]) -> Vec<i32> {
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (input, output) = (scratch.join("cases.bin"), scratch.join("plans.bin"));
    let bytes: Vec<u8> = cases
        .iter()
        .enumerate()
        .flat_map(|(i, case)| case_bytes(case, i))
        .collect();
    std::fs::write(&input, bytes).unwrap();
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

fn case_bytes(case: &Case, index: usize) -> Vec<u8> {
    let stride = if index.is_multiple_of(2) { 1 } else { STRIDE };
    let mut elements = vec![i32::MIN; case.seq_lens.len() * stride];
    for (request, &len) in case.seq_lens.iter().enumerate() {
        elements[request * stride] = len;
    }
    let mut bytes = bytemuck::bytes_of(&case.shape).to_vec();
    bytes.extend(bytemuck::bytes_of(&layout(&case.shape).unwrap()));
    bytes.extend(bytemuck::bytes_of(&[elements.len() as i64, stride as i64]));
    bytes.extend(bytemuck::cast_slice::<i32, u8>(&elements));
    bytes
}

/// g++ is a requirement of the build: without it this fails. Undefined behaviour traps.
fn compile(scratch: &Path) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels");
    let program = scratch.join("emulated_planner");
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
        .arg("-I")
        .arg(kernels)
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
