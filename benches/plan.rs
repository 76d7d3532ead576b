//! Time to plan on the host, by batch size, for DeepSeek-V3 decoding with all heads on an H200.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ferromla_schedule::{Keys, PlanShape, Problem, Queries, Split, Target, layout, plan_into};

const MAX_SEQ_LEN: i32 = 1 << 17;

fn shape(batch: i32, split: Split) -> PlanShape {
    Problem {
        batch,
        queries: Queries::Uniform { q_len: 1 },
        group: 128,
        kv_heads: 1,
        keys: Keys::Pages,
        causal: true,
        max_seq_len: MAX_SEQ_LEN,
        split,
        target: Target::Gpu {
            sm_count: 132,
            clusters: [66, 30, 15, 7],
            memory: 4814,
        },
    }
    .shape()
    .expect("the benched shapes are valid")
}

/// Lengths from 1 to 32768 tokens in a fixed scattered order.
fn seq_lens(batch: i32) -> Vec<i32> {
    (0..batch as u32)
        .map(|i| (i.wrapping_mul(0x9e37_79b1) >> 17) as i32 + 1)
        .collect()
}

fn plan(criterion: &mut Criterion) {
    for (name, split) in [
        ("auto", Split::Auto),
        ("fixed", Split::Fixed(4)),
        ("invariant", Split::INVARIANT),
    ] {
        let mut group = criterion.benchmark_group(format!("plan/{name}"));
        for batch in [1, 32, 128, 1024, 8192, 65536] {
            let shape = shape(batch, split);
            let lens = seq_lens(batch);
            let mut words = vec![0; layout(&shape).expect("valid").words()];
            group.throughput(Throughput::Elements(batch as u64));
            group.bench_with_input(
                BenchmarkId::from_parameter(batch),
                &lens,
                |bencher, lens| {
                    bencher.iter(|| {
                        plan_into(&shape, black_box(lens.as_slice()), None, &mut words)
                            .expect("valid")
                    });
                },
            );
        }
        group.finish();
    }
}

criterion_group!(benches, plan);
criterion_main!(benches);
