//! Time a decode call costs its host thread: checks, tensor maps, launches. The device's own time is hidden by
//! waiting for it outside the clock.

mod gpu;

use std::time::{Duration, Instant};

use criterion::Criterion;
use ferromla::decode;
use gpu::{Memory, Problem, gpu_or_explain};

/// Launches in flight at once, below the depth at which the driver makes the host wait.
const IN_FLIGHT: u64 = 64;

fn main() {
    let Some(gpu) = gpu_or_explain("launch") else {
        return;
    };
    let mut criterion = Criterion::default().configure_from_args();
    let problem = Problem::new(&gpu, 1, 1024, 16);
    let plan = problem.plan();
    let mut own = problem.args(None, 0);
    own.workspace = Some(problem.workspace(own.workspace_bytes().unwrap()));
    for (name, args) in [
        ("with a plan", problem.args(Some(&plan), 0)),
        ("without a plan", own),
    ] {
        criterion.bench_function(&format!("host launch/{name}"), |bencher| {
            bencher.iter_custom(|iterations| {
                let mut spent = Duration::ZERO;
                for done in (0..iterations).step_by(IN_FLIGHT as usize) {
                    let start = Instant::now();
                    for _ in done..iterations.min(done + IN_FLIGHT) {
                        // SAFETY: all memory is the GPU's, which outlives the bench.
                        unsafe { decode(&args).unwrap() };
                    }
                    spent += start.elapsed();
                    let _: Vec<f32> = gpu.download(args.lse.ptr(), 1, problem.stream());
                }
                spent
            });
        });
    }
    criterion.final_summary();
}
