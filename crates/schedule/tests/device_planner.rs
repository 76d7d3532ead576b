//! The planner of the device writes the plan of the host: `kernels/plan.cu` itself, compiled by g++ over
//! the emulated GPU of `tests/emulator`, against [`plan_into`](ferromla_schedule::plan_into), byte by byte.

#[path = "support/emulator.rs"]
mod emulator;
mod support;

use std::fmt::Debug;

use ferromla_schedule::plan_layout::{
    FM_PLAN_CLUSTER, FM_PLAN_CLUSTER_THREADS, FM_PLAN_THREADS, FM_SPLIT_AUTO, FM_SPLIT_FIXED,
    FM_SPLIT_INVARIANT, FM_SPLIT_REST,
};
use ferromla_schedule::{PlanHeader, PlanShape, PlanView, PlannerKernel, PlannerLaunch, layout};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use support::batches::{
    around_the_longest_small_line, dealt_whole, decode_step, equal_and_more_than_workers,
    equal_units, few_ranges, fixed_parts, longest, many_ranges, many_requests, many_units,
    one_part_each, overlapping_ranges, parts_by_count, ragged, too_long_for_32_bits,
};
use support::few_units;
use support::line::unit_key;
use support::sparse::{Lens, SparseCase, plan_sparse, sparse_cases, sparse_shape};
use support::{
    Case, Planned, beside_whole, cases_of, deals_out_empty_units, has_parts_beside_whole, plan,
};

const CASES_PER_MODE: usize = 100;
/// Cases of few units besides.
const FEW_UNITS: usize = 400;
const MORE_UNITS: usize = 60;
const BESIDE_WHOLE: usize = 200;
/// Elements between two lengths of every second case.
const STRIDE: usize = 3;

#[test]
fn the_device_writes_the_plan_of_the_host() {
    let jobs: Vec<Job> = dense_jobs().into_iter().chain(sparse_jobs()).collect();
    let alike = with_too_many_units();
    let plans = emulator::run(jobs.iter().chain(&alike).flat_map(Job::bytes).collect());
    let mut rest = plans.as_slice();
    let (mut cut, mut whole, mut dealt, mut empty, mut beside) = (0, 0, 0, 0, 0);
    let mut by_cluster = [0; 2];
    for job in &jobs {
        let ours = &job.planned;
        let (theirs, after) = rest
            .split_at_checked(ours.words.len())
            .expect("a plan for every case");
        rest = after;
        assert_same_plan(job, theirs);
        cut += usize::from(ours.header.merges > 0);
        whole += usize::from(ours.header.whole != 0);
        let in_order = ours.view().items().is_sorted_by_key(unit_key);
        dealt += usize::from(ours.header.whole != 0 && !in_order);
        empty += usize::from(deals_out_empty_units(ours));
        beside += usize::from(has_parts_beside_whole(ours));
        if job.planned.layout.planner(&job.planned.shape).kernel == PlannerKernel::Cluster {
            by_cluster[usize::from(ours.header.whole != 0)] += 1;
        }
    }
    let (by_cluster_of_too_many, by_block) = rest.split_at(rest.len() / 2);
    assert_eq!(rest.len(), 2 * alike[0].planned.layout.words());
    assert!(
        by_cluster_of_too_many == by_block,
        "{}: units {} and {}",
        alike[0].context,
        header_of(by_cluster_of_too_many).units,
        header_of(by_block).units
    );
    assert!(
        cut > 50
            && whole > 10
            && dealt > 5
            && empty > 50
            && beside >= 10
            && by_cluster.iter().all(|&of| of > 20),
        "the cases are of all kinds: {cut} cut, {whole} whole, {dealt} of these dealt, {empty} with empty units beside equal parts, {beside} with parts beside whole units, \
         {by_cluster:?} for clusters, cut and whole"
    );
}

/// Equal in the header, worker ranges, merges and items in use. Nothing else is specified.
fn assert_same_plan(job: &Job, theirs: &[i32]) {
    let (at, ours) = (&job.planned.layout, &job.planned.words);
    let plan = PlanView::new(&job.planned.shape, ours).unwrap();
    let context = || &job.context;
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

fn header_of(plan: &[i32]) -> PlanHeader {
    bytemuck::pod_read_unaligned(bytemuck::cast_slice(&plan[..size_of::<PlanHeader>() / 4]))
}

/// Overlapping ranges that ask for 2^32 units, and one more, of one CTA of the cluster: for it and for one block, which must plan the units
/// that the layout has. That is one for fewer query tokens, as one for all would be a quarter of a gigabyte.
fn with_too_many_units() -> [Job; 2] {
    let case = overlapping_ranges();
    let fewer = PlanShape {
        q_tokens: 64,
        ..case.shape
    };
    let layout = layout(&fewer).unwrap();
    let lens = |data: &[i32]| Lens {
        data: data.to_vec(),
        stride: [1, 0],
    };
    [
        (PlannerKernel::Cluster, FM_PLAN_CLUSTER),
        (PlannerKernel::Many, 1),
    ]
    .map(|(kernel, cluster)| Job {
        planned: Planned {
            shape: case.shape,
            layout,
            header: PlanHeader::default(),
            words: Vec::new(),
        },
        launch: PlannerLaunch {
            blocks: 1,
            cluster: cluster as u32,
            threads: FM_PLAN_CLUSTER_THREADS as u32,
            kernel,
        },
        arrays: [
            Some(lens(&case.seq_lens)),
            None,
            Some(lens(&case.qo_indptr)),
        ],
        context: "overlapping ranges".to_string(),
    })
}

/// What the device plans, and the plan of the host.
struct Job {
    planned: Planned,
    launch: PlannerLaunch,
    /// `seq_lens`, `extra_lens` and `qo_indptr`; `None` is a null pointer.
    arrays: [Option<Lens>; 3],
    context: String,
}

impl Job {
    fn new(index: usize, planned: Planned, arrays: [Option<Lens>; 3], case: &dyn Debug) -> Self {
        // The device plans with any whole warps, and each kernel where the mode fixes no parts, best as the layout says.
        let best = planned.layout.planner(&planned.shape);
        let launch = match index % 8 {
            _ if best.kernel == PlannerKernel::OnePart => PlannerLaunch {
                blocks: [best.blocks, 1, 2, 5][index % 4],
                threads: [best.threads, 32, 256][index % 3],
                ..best
            },
            _ if best.kernel == PlannerKernel::ByCount => PlannerLaunch {
                threads: [best.threads, FM_PLAN_THREADS as u32][index % 2],
                ..best
            },
            0 | 6 if best.kernel != PlannerKernel::Cluster || index.is_multiple_of(16) => {
                PlannerLaunch {
                    blocks: 1,
                    cluster: 1,
                    threads: 32 << (index / 8 % if index % 8 == 6 { 5 } else { 6 }),
                    kernel: match index % 8 {
                        0 => PlannerKernel::Many,
                        _ => PlannerKernel::Few,
                    },
                }
            }
            2 | 4 => PlannerLaunch {
                blocks: 1,
                cluster: FM_PLAN_CLUSTER as u32,
                threads: FM_PLAN_CLUSTER_THREADS as u32,
                kernel: PlannerKernel::Cluster,
            },
            _ => best,
        };
        Self {
            planned,
            launch,
            arrays,
            context: format!("case {index}: {case:?}"),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = bytemuck::bytes_of(&self.planned.shape).to_vec();
        bytes.extend(bytemuck::bytes_of(&self.planned.layout));
        bytes.extend(bytemuck::bytes_of(&[
            i64::from(self.launch.threads),
            self.launch.kernel as i64,
            i64::from(self.launch.blocks),
            i64::from(self.launch.cluster),
        ]));
        for array in &self.arrays {
            let (count, stride, data) = match array {
                Some(Lens { data, stride }) => (data.len() as i64, *stride, data.as_slice()),
                None => (-1, [0, 0], [].as_slice()),
            };
            bytes.extend(bytemuck::bytes_of(&[
                count,
                stride[0] as i64,
                stride[1] as i64,
            ]));
            bytes.extend(bytemuck::cast_slice::<i32, u8>(data));
        }
        bytes
    }
}

fn dense_jobs() -> Vec<Job> {
    let job = |(index, case): (usize, Case)| {
        let stride = if index.is_multiple_of(2) { 1 } else { STRIDE };
        let spread = |entries: &[i32]| {
            let mut data = vec![i32::MIN; entries.len() * stride];
            for (entry, &value) in entries.iter().enumerate() {
                data[entry * stride] = value;
            }
            Some(Lens {
                data,
                stride: [stride, 0],
            })
        };
        let indptr = match case.shape.ragged {
            0 => None,
            _ => spread(&case.qo_indptr),
        };
        let arrays = [spread(&case.seq_lens), None, indptr];
        Job::new(index, plan(&case), arrays, &case)
    };
    seeded_cases().into_iter().enumerate().map(job).collect()
}

fn sparse_jobs() -> Vec<Job> {
    let mut runner = seeded_runner();
    let mut cases = drawn(&mut runner, 2 * CASES_PER_MODE, sparse_cases());
    cases.extend([(FM_SPLIT_AUTO, 341, 3), (FM_SPLIT_AUTO, 1, 70_000)].map(many_lists));
    cases.extend([(FM_SPLIT_FIXED, 1, 3000), (FM_SPLIT_INVARIANT, 700, 2)].map(many_lists));
    cases
        .extend(one_part_each().flat_map(|case| [true, false].map(|given| lists_of(&case, given))));
    // Of one request, dealt out longest first.
    let tokens = [390, 450, 640, 641];
    cases.extend(tokens.map(|n| lists_of(&few_units::evenly_distributed(64, n), true)));
    cases.extend(rests());
    cases.extend(
        (1..300)
            .step_by(11)
            .map(|batch| equal_lists(&mut runner, batch)),
    );
    let job = |(index, case): (usize, SparseCase)| {
        let arrays = [case.topk_lengths.clone(), case.extra_lengths.clone(), None];
        Job::new(index, plan_sparse(&case), arrays, &case)
    };
    cases.into_iter().enumerate().map(job).collect()
}

/// Of one request, a list for each unit; where lengths are not given all count.
fn lists_of(case: &Case, given: bool) -> SparseCase {
    let one = PlanShape {
        batch: 1,
        ..case.shape
    };
    SparseCase {
        shape: sparse_shape(one, case.shape.batch, case.shape.max_seq_len, 0),
        topk_lengths: given.then(|| Lens {
            data: case.seq_lens.clone(),
            stride: [0, 1],
        }),
        extra_lengths: None,
    }
}

/// Lists that are left when all workers have as many: cut, too many or too short to be cut, none, or of lengths that are given.
fn rests() -> impl Iterator<Item = SparseCase> {
    let batches = [
        (0, 5),
        (1, 5),
        (1, 132),
        (1, 136),
        (2, 68),
        (1, 200),
        (3, 1000),
        (1, 4096),
        (4, 1024),
        (1, 17_000),
        (1, 70_000),
    ];
    let lists = [
        (2048, 0),
        (2000, 640),
        (512, 0),
        (700, 3),
        (0, 0),
        (20_000, 100),
    ];
    let all = batches
        .into_iter()
        .flat_map(move |batch| lists.map(|lists| (batch, lists)));
    let all = all.zip((0usize..).map(|i| [132, 66, 7, 256][i % 4]));
    all.enumerate()
        .map(|(i, (((batch, q_len), (topk, extra)), workers))| {
            let mut of = many_units(FM_SPLIT_REST, batch).shape;
            (of.workers, of.split_cost, of.min_part) = (workers, 10, 1 + i as i32 % 3);
            let lengths = many_units(FM_SPLIT_REST, batch * q_len).seq_lens;
            SparseCase {
                shape: sparse_shape(of, q_len, topk, extra),
                topk_lengths: (i % 5 == 4).then_some(Lens {
                    data: lengths,
                    stride: [q_len as usize, 1],
                }),
                extra_lengths: None,
            }
        })
}

fn many_lists((split_mode, batch, q_len): (i32, i32, i32)) -> SparseCase {
    let of = many_units(split_mode, batch);
    let data = many_units(split_mode, batch * q_len).seq_lens;
    SparseCase {
        shape: sparse_shape(of.shape, q_len, 2048, 640),
        topk_lengths: Some(Lens {
            data: data.iter().map(|len| len % 2500).collect(),
            stride: [q_len as usize, 1],
        }),
        extra_lengths: Some(Lens {
            data,
            stride: [1, batch as usize],
        }),
    }
}

/// A list for each of two tokens, empty or as long as others.
fn equal_lists(runner: &mut TestRunner, batch: i32) -> SparseCase {
    let case = equal_units(runner, batch, 2);
    SparseCase {
        shape: sparse_shape(case.shape, 2, 20_000, 0),
        topk_lengths: Some(Lens {
            data: case.seq_lens,
            stride: [1, 0],
        }),
        extra_lengths: None,
    }
}

fn seeded_runner() -> TestRunner {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    TestRunner::new_with_rng(Config::default(), rng)
}

/// So many random values.
fn drawn<S: Strategy>(runner: &mut TestRunner, number: usize, of: S) -> Vec<S::Value> {
    let one = |_| of.new_tree(runner).unwrap().current();
    (0..number).map(one).collect()
}

fn seeded_cases() -> Vec<Case> {
    let mut runner = seeded_runner();
    let mut cases = Vec::new();
    for mode in [FM_SPLIT_AUTO, FM_SPLIT_FIXED, FM_SPLIT_INVARIANT] {
        cases.extend(drawn(&mut runner, CASES_PER_MODE, cases_of(mode)));
        cases.extend(
            [
                768, 769, 1024, 1025, 1600, 2047, 2048, 2049, 2560, 2561, 7000,
            ]
            .map(|units| many_units(mode, units)),
        );
        cases.extend([100, 400, 700, 900, 1024, 1025, 3000].map(|batch| many_ranges(mode, batch)));
        cases.extend([(1, 12_000), (3, 1000), (2000, 500)].map(|(b, t)| few_ranges(mode, b, t)));
        cases.push(longest(mode));
    }
    cases.extend(
        (1..400)
            .step_by(7)
            .map(|batch| decode_step(&mut runner, batch)),
    );
    let batches = (1..300).step_by(7).chain((500..1400).step_by(150));
    cases.extend(batches.flat_map(|batch| {
        let case = equal_units(&mut runner, batch, 1);
        let q_lens = vec![case.shape.q_len; case.seq_lens.len()];
        [case.clone(), ragged(case, &q_lens)]
    }));
    cases.extend([(4, 256), (5, 256), (4, 257), (1, 66), (2, 16)].map(fixed_parts));
    cases.extend(
        (1..=512)
            .step_by(17)
            .flat_map(|batch| [FM_SPLIT_FIXED, FM_SPLIT_INVARIANT].map(|mode| (mode, batch)))
            .map(|of| parts_by_count(&mut runner, of)),
    );
    cases.extend(one_part_each());
    cases.push(many_units(FM_SPLIT_AUTO, 65_536));
    cases.push(many_ranges(FM_SPLIT_AUTO, 65_536));
    cases.extend(many_requests());
    cases.extend((126..134).map(dealt_whole));
    cases.extend(few_units::named_cases());
    cases.extend(drawn(&mut runner, FEW_UNITS, few_units::random_cases()));
    cases.extend(drawn(
        &mut runner,
        MORE_UNITS,
        few_units::random_cases_of_more(),
    ));
    cases.extend(equal_and_more_than_workers());
    cases.extend(beside_whole::named_cases());
    cases.extend(beside_whole::named_cases_instead_of_whole());
    cases.extend(drawn(
        &mut runner,
        BESIDE_WHOLE,
        beside_whole::random_cases(),
    ));
    cases.extend([0, 1].map(around_the_longest_small_line));
    cases.extend([3, 40, 900].map(too_long_for_32_bits));
    cases
}
