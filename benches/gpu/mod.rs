//! Decode problems on CUDA device 0, for the benches.

#[allow(dead_code)]
#[path = "../../tests/reference/mod.rs"]
mod reference;

use ferromla::{DType, DecodeArgs, Device, Plan, PlanArgs, Stream, View, support, workspace_bytes};
pub use reference::cuda::Gpu;
pub use reference::memory::Memory;

const PAGE_SIZE: usize = 64;
/// What is read between two uses of a page, so that no page is still in the L2 cache.
const ROTATION_BYTES: usize = 256 << 20;

/// The GPU, or the reason why there is nothing to measure.
pub fn gpu_or_explain(bench: &str) -> Option<Gpu> {
    match support(Device::Cuda(0)).reason {
        None => Some(Gpu::new()),
        Some(reason) => {
            println!("{bench}: nothing measured, {reason}");
            None
        }
    }
}

/// One bf16 problem with several block tables over different pages, taken in turn.
pub struct Problem<'g> {
    gpu: &'g Gpu,
    batch: usize,
    heads: usize,
    pages: usize,
    num_pages: usize,
    q: u64,
    cache: u64,
    tables: Vec<u64>,
    lens: u64,
    out: u64,
    lse: u64,
}

impl<'g> Problem<'g> {
    pub fn new(gpu: &'g Gpu, batch: usize, seq_len: usize, heads: usize) -> Self {
        let pages = seq_len.div_ceil(PAGE_SIZE);
        let bytes = batch * pages * PAGE_SIZE * 1152;
        let turns = 1 + ROTATION_BYTES.div_ceil(bytes);
        let num_pages = turns * batch * pages;
        let mut shuffled: Vec<i32> = (0..num_pages as i32).collect();
        let mut state = 1u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state
        };
        for i in (1..num_pages).rev() {
            shuffled.swap(i, (random() as usize) % (i + 1));
        }
        let mut noise = |len: usize| -> Vec<u16> {
            // Both signs and three binades: 0x3f00 is 0.5.
            (0..len)
                .map(|_| ((random() >> 16) & 0x80ff | 0x3f00) as u16)
                .collect()
        };
        Self {
            q: gpu.upload(&noise(batch * heads * 576)),
            cache: gpu.upload(&noise(num_pages * PAGE_SIZE * 576)),
            tables: shuffled
                .chunks_exact(batch * pages)
                .map(|table| gpu.upload(table))
                .collect(),
            lens: gpu.upload(&vec![seq_len as i32; batch]),
            out: gpu.upload(&vec![0u16; batch * heads * 512]),
            lse: gpu.upload(&vec![0f32; batch * heads]),
            gpu,
            batch,
            heads,
            pages,
            num_pages,
        }
    }

    fn view(&self, ptr: u64, dtype: DType, shape: &[usize]) -> View {
        let shape: Vec<i64> = shape.iter().map(|&dim| dim as i64).collect();
        // SAFETY: the memory is the GPU's as long as `gpu` lives, and of this shape.
        unsafe { View::contiguous(ptr as *const _, dtype, Device::Cuda(0), &shape) }
    }

    pub fn plan(&self) -> Plan {
        let args = PlanArgs::new(Device::Cuda(0), self.batch as i64, self.heads as i64);
        let bytes = workspace_bytes(&args).unwrap();
        let workspace = self.workspace(bytes);
        let lens = self.view(self.lens, DType::I32, &[self.batch]);
        // SAFETY: all memory is the GPU's as long as `gpu` lives.
        unsafe { Plan::new(&args, &lens, None, workspace, self.stream()).unwrap() }
    }

    pub fn workspace(&self, bytes: u64) -> View {
        let ptr = self.gpu.upload(&vec![0u8; bytes as usize]);
        self.view(ptr, DType::U8, &[bytes as usize])
    }

    pub fn stream(&self) -> Stream {
        self.gpu.stream()
    }

    /// Call number `turn`.
    pub fn args<'p>(&self, plan: Option<&'p Plan>, turn: usize) -> DecodeArgs<'p> {
        let Self { batch, heads, .. } = *self;
        let table = self.tables[turn % self.tables.len()];
        DecodeArgs {
            plan,
            stream: self.stream(),
            ..DecodeArgs::new(
                self.view(self.q, DType::Bf16, &[batch, 1, heads, 576])
                    .into(),
                self.view(self.cache, DType::Bf16, &[self.num_pages, PAGE_SIZE, 576])
                    .into(),
                self.view(table, DType::I32, &[batch, self.pages]),
                self.view(self.lens, DType::I32, &[batch]),
                self.view(self.out, DType::Bf16, &[batch, 1, heads, 512]),
                self.view(self.lse, DType::F32, &[batch, 1, heads]),
            )
        }
    }
}
