//! Batches to plan for of every way that the device has of planning.

use ferromla_schedule::PlanShape;
use ferromla_schedule::plan_layout::{
    FM_PLAN_CLUSTER, FM_PLAN_CLUSTER_REQUESTS, FM_SPLIT_AUTO, FM_SPLIT_FIXED,
};
use proptest::prelude::prop;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use super::{Case, equal_or_empty, indptr_of, on_h200};

/// Equal requests, more than workers, of which some are cut; with and without empty ones, ragged, too, and more than are few.
pub fn equal_and_more_than_workers() -> Vec<Case> {
    let requests = |heads, filled: usize, every| {
        let lens =
            (0..filled + filled / every).map(|i| if i % (every + 1) == every { 0 } else { 4096 });
        on_h200(heads, lens.collect())
    };
    let mut cases = vec![
        requests(64, 144, 1000),
        requests(64, 136, 3),
        requests(128, 72, 1),
        requests(128, 144, 7),
    ];
    let mut many = requests(64, 385, 1000);
    (many.shape.workers, many.shape.whole_speed) = (155, 256);
    cases.push(many);
    let q_lens = |case: &Case| vec![1; case.seq_lens.len()];
    cases
        .iter()
        .flat_map(|case| [case.clone(), ragged(case.clone(), &q_lens(case))])
        .collect()
}

/// What a decode step asks for on a GPU, by far the most frequent case.
pub fn decode_step(runner: &mut TestRunner, batch: i32) -> Case {
    let mut case = many_units(FM_SPLIT_AUTO, batch);
    case.shape.max_seq_len = i32::MAX;
    case.shape.workers = [132, 66, 33, 16][batch as usize % 4];
    case.shape.whole_speed = [256, 640][batch as usize % 2];
    (
        case.shape.fixed_cost,
        case.shape.split_cost,
        case.shape.min_part,
    ) = (5, 10, 2);
    let lens = prop::collection::vec(0..5000i32, batch as usize);
    case.seq_lens = lens.new_tree(runner).unwrap().current();
    case.seq_lens[0] = [100, 131_072][batch as usize / 4 % 2];
    case
}

/// Requests of one length among empty ones: in most batches so few that workers are enough to cut them.
pub fn equal_units(runner: &mut TestRunner, batch: i32, lists: i32) -> Case {
    let mut case = decode_step(runner, batch);
    case.shape.workers = [132, 66, 255, 7, 256, 1000][batch as usize % 6];
    case.shape.kv_heads = 1 + batch % 3 / 2;
    let seq_lens = equal_or_empty(batch as usize);
    case.seq_lens = seq_lens.new_tree(runner).unwrap().current();
    if batch % 4 != 1 {
        let most = case.shape.workers / 2 / case.shape.kv_heads / lists;
        let filled = case.seq_lens.iter_mut().filter(|len| **len > 0);
        filled.skip(most as usize).for_each(|len| *len = 0);
    }
    case
}

/// A line of 2^26 tiles or one less: the shortest that needs 64 bits and the longest that does not.
pub fn around_the_longest_small_line(less: i32) -> Case {
    let mut case = many_units(FM_SPLIT_AUTO, 2);
    case.shape.max_seq_len = i32::MAX;
    case.seq_lens = vec![i32::MAX, i32::MAX - 64 * (4 + less)];
    case
}

pub fn too_long_for_32_bits(batch: i32) -> Case {
    let mut case = many_units(FM_SPLIT_AUTO, batch);
    case.shape.max_seq_len = i32::MAX;
    case.seq_lens = vec![i32::MAX; batch as usize];
    case
}

/// Around the ends of a round of threads, and of what shared memory holds.
pub fn many_units(split_mode: i32, units: i32) -> Case {
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

/// Two to a worker, the longest with the shortest.
pub fn dealt_whole(batch: i32) -> Case {
    let mut case = many_units(FM_SPLIT_AUTO, batch);
    (case.shape.workers, case.shape.split_cost) = (66, 40);
    case
}

/// More than a thread each has one of, so that a cluster plans them: of one length, of any, one of them long, many empty, short; of one
/// query token or two for all, a few for each, many for one or for all of them.
pub fn many_requests() -> impl Iterator<Item = Case> {
    type OfRequest = fn(i32) -> i32;
    let queries: [(i32, OfRequest); 11] = [
        (700, |_| 1),
        (5000, |_| 1),
        (1300, |_| 2),
        (900, |i| 2 + i % 2),
        (300, |i| i * 7 % 11),
        (700, |i| if i == 411 { 900 } else { 1 }),
        (12, |i| 300 + i),
        (16_384, |i| i % 3),
        (900, |i| i32::from(i % 30 == 0)),
        (901, |i| i32::from(i % 20 == 0)),
        (200, |_| 1),
    ];
    let lengths: [OfRequest; 9] = [
        |_| 4096,
        |i| i.wrapping_mul(0x9e37_79b1_u32 as i32).rem_euclid(9000),
        |i| if i == 5 { 3_000_000 } else { 300 },
        |i| if i % 9 == 0 { i * 13 % 5000 } else { 0 },
        |i| i % 64,
        |i| 40 + i % 50,
        |i| 2000 + i % 3 * 1000,
        |i| if i == 5 { 20_000 } else { i % 64 },
        |i| i32::MAX - i,
    ];
    let shapes = [(132, 64, 2), (66, 128, 6), (255, 192, 100), (7, 64, 1)];
    let all = queries
        .into_iter()
        .flat_map(move |queries| lengths.map(|lengths| (queries, lengths)));
    let all = all.zip(shapes.into_iter().cycle().flat_map(|shape| [shape; 5]));
    all.map(
        |(((batch, q_len), seq_len), (workers, unit_rows, min_part))| {
            let mut case = many_units(FM_SPLIT_AUTO, batch);
            case.shape.max_seq_len = 1 << 22;
            (case.shape.workers, case.shape.unit_rows) = (workers, unit_rows);
            (case.shape.min_part, case.shape.whole_speed) = (min_part, 256 + 64 * (workers % 4));
            case.seq_lens = (0..batch).map(seq_len).collect();
            if batch == 1300 {
                case.shape.q_len = 2;
                return case;
            }
            let q_lens: Vec<i32> = (0..batch).map(q_len).collect();
            match q_lens.iter().all(|&len| len == 1) {
                true => case,
                false => ragged(case, &q_lens),
            }
        },
    )
}

/// As many parts and workers as are dealt, or one more, and rounds of parts.
pub fn fixed_parts((num_splits, workers): (i32, i32)) -> Case {
    let mut case = many_units(FM_SPLIT_FIXED, 512);
    (case.shape.num_splits, case.shape.workers) = (num_splits, workers);
    case.seq_lens.iter_mut().for_each(|len| *len += 1024); // so that each has as many parts
    case
}

/// Lengths of a decode step, some of them alike, and parts of them that the mode fixes.
pub fn parts_by_count(runner: &mut TestRunner, (split_mode, batch): (i32, i32)) -> Case {
    let mut case = decode_step(runner, batch);
    case.shape.split_mode = split_mode;
    (case.shape.num_splits, case.shape.part_tiles) = ([1, 2, 3, 7, 32][batch as usize % 5], 16);
    let alike = 1 + batch % 3 * 500;
    case.seq_lens
        .iter_mut()
        .for_each(|len| *len -= *len % alike);
    case
}

/// So many units, whole ones, that several blocks plan: for few workers and for many, some without a tile, or all without a cost.
pub fn one_part_each() -> impl Iterator<Item = Case> {
    let batches = [513, 700, 1025, 2048, 4096, 4097, 9000, 70_000];
    let ways = [
        (132, 2, 25_000),
        (66, 0, 25_000),
        (5000, 1, 100),
        (7, 0, 0),
        (7, i32::MAX, i32::MAX - 63),
    ];
    let cases = batches.into_iter().zip(ways.into_iter().cycle());
    cases.map(|(batch, (workers, fixed_cost, max_seq_len))| {
        let mut case = many_units(FM_SPLIT_FIXED, batch);
        (case.shape.num_splits, case.shape.workers) = (1, workers);
        (case.shape.fixed_cost, case.shape.max_seq_len) = (fixed_cost, max_seq_len);
        case.seq_lens
            .iter_mut()
            .skip(3)
            .step_by(3)
            .for_each(|len| *len = 0);
        case
    })
}

/// Ranges of 0 to 3 query tokens.
pub fn many_ranges(split_mode: i32, batch: i32) -> Case {
    let case = many_units(split_mode, batch);
    let q_lens: Vec<i32> = (0..batch).map(|i| i % 97 * i % 7 % 4).collect();
    ragged(case, &q_lens)
}

/// Ranges of many query tokens, more than shared memory holds units of where there are 12,000.
pub fn few_ranges(split_mode: i32, batch: i32, tokens: i32) -> Case {
    let mut case = many_units(split_mode, batch);
    case.shape.kv_heads = 2;
    case.shape.unit_rows = 128;
    let mut q_lens = vec![0; batch as usize];
    q_lens[batch as usize / 2] = tokens - 1;
    q_lens[batch as usize - 1] += 1;
    ragged(case, &q_lens)
}

/// A CTA of the cluster that plans has requests every second of which has all query tokens, 2^22 units: 2^32 altogether.
pub fn overlapping_ranges() -> Case {
    let of_cta = FM_PLAN_CLUSTER_REQUESTS as usize;
    let mut case = many_units(FM_SPLIT_AUTO, FM_PLAN_CLUSTER * FM_PLAN_CLUSTER_REQUESTS);
    (case.shape.ragged, case.shape.q_len) = (1, 0);
    (case.shape.q_tokens, case.shape.unit_rows) = (1 << 16, 1);
    case.qo_indptr = vec![case.shape.q_tokens; case.seq_lens.len() + 1];
    let begins = case.qo_indptr[..of_cta].iter_mut().step_by(2);
    begins.for_each(|begin| *begin = 0);
    case
}

pub fn ragged(mut case: Case, q_lens: &[i32]) -> Case {
    case.qo_indptr = indptr_of(q_lens);
    (case.shape.ragged, case.shape.q_len) = (1, 0);
    case.shape.q_tokens = q_lens.iter().sum();
    case
}

/// The longest lengths and costs there are.
pub fn longest(split_mode: i32) -> Case {
    let shape = PlanShape {
        batch: 500,
        q_len: 1,
        group: 64,
        kv_heads: 4,
        causal: 1,
        unit_rows: 64,
        workers: 132,
        split_mode,
        num_splits: 3,
        part_tiles: 64,
        max_seq_len: i32::MAX,
        fixed_cost: i32::MAX,
        split_cost: 0,
        min_part: 1 << 20,
        ragged: 0,
        q_tokens: 0,
        whole_speed: 256,
        equal_speed: 256,
        ..Default::default()
    };
    Case {
        shape,
        seq_lens: vec![i32::MAX; 500],
        qo_indptr: Vec::new(),
    }
}
