//! Time a decode takes on the device, planned beforehand: CUDA events around calls that follow each other, each
//! over pages that the L2 cache does not hold. Where the host launches slower than the device computes (small
//! batches) this is the host's pace; the Python bench replays graphs.

mod gpu;

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput};
use cudarc::driver::sys;
use ferromla::decode;
use gpu::{Problem, gpu_or_explain};

/// Batch, tokens per request, heads.
const PROBLEMS: [(usize, usize, usize); 6] = [
    (1, 8192, 16),
    (1, 8192, 128),
    (8, 4096, 128),
    (32, 8192, 128),
    (128, 4096, 16),
    (128, 4096, 128),
];

/// A pair of events on one stream.
struct Clock {
    begin: sys::CUevent,
    end: sys::CUevent,
    stream: sys::CUstream,
}

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

impl Clock {
    fn new(stream: sys::CUstream) -> Self {
        let (mut begin, mut end) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the GPU's context is current.
        unsafe {
            ok(sys::cuEventCreate(&mut begin, 0));
            ok(sys::cuEventCreate(&mut end, 0));
        }
        Self { begin, end, stream }
    }

    fn time(&self, work: impl FnOnce()) -> Duration {
        let mut milliseconds = 0.0;
        // SAFETY: events and stream are live, and both events are recorded before they are compared.
        unsafe {
            ok(sys::cuEventRecord(self.begin, self.stream));
            work();
            ok(sys::cuEventRecord(self.end, self.stream));
            ok(sys::cuEventSynchronize(self.end));
            ok(sys::cuEventElapsedTime_v2(
                &mut milliseconds,
                self.begin,
                self.end,
            ));
        }
        Duration::from_secs_f64(f64::from(milliseconds) * 1e-3)
    }
}

fn main() {
    let Some(gpu) = gpu_or_explain("device") else {
        return;
    };
    let mut criterion = Criterion::default().configure_from_args();
    let clock = Clock::new(gpu.stream().0 as sys::CUstream);
    let mut group = criterion.benchmark_group("device");
    for (batch, seq_len, heads) in PROBLEMS {
        let problem = Problem::new(&gpu, batch, seq_len, heads);
        let plan = problem.plan();
        group.throughput(Throughput::Bytes((batch * seq_len * 1152) as u64));
        let name = BenchmarkId::from_parameter(format!("b{batch} s{seq_len} h{heads}"));
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| {
                clock.time(|| {
                    for turn in 0..iterations as usize {
                        // SAFETY: all memory is the GPU's, which outlives the bench.
                        unsafe { decode(&problem.args(Some(&plan), turn)).unwrap() };
                    }
                })
            });
        });
    }
    group.finish();
    criterion.final_summary();
}
