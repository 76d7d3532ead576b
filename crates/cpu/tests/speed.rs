//! Times of large decodes, to look at: `cargo test --release -p ferromla-cpu --test speed -- --ignored
//! --nocapture`.

mod common;

use std::time::{Duration, Instant};

use common::case::{Case, Inputs};
use ferromla_cpu::Format;

#[test]
#[ignore = "a measurement; meaningful in release builds on an idle machine"]
fn decode_of_four_requests_with_128_heads_takes_under_a_second() {
    for (b, h, s_q, len, format) in [
        (4, 128, 1, 4096, Format::Bf16),
        (4, 128, 1, 4096, Format::Fp16),
        (4, 128, 2, 4096, Format::Bf16),
        (4, 16, 1, 4096, Format::Bf16),
        (4, 1, 1, 4096, Format::Bf16),
        (1, 16, 1, 100, Format::Bf16),
    ] {
        let case = Case {
            seq_lens: vec![len; b],
            h,
            s_q,
            format,
            ..Case::default()
        };
        let mut inputs = Inputs::new(&case);
        let mut best = Duration::MAX;
        for _ in 0..5 {
            let start = Instant::now();
            inputs.run();
            best = best.min(start.elapsed());
        }
        let threads = rayon::current_num_threads();
        println!("b={b} h={h} s_q={s_q} seq={len} {format:?}: {best:.2?} on {threads} threads");
        assert!(best < Duration::from_secs(1));
    }
}
