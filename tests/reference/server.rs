//! A workload in the memory of a device, and calls on it by raw pointers, as a server makes them.

use ferromla::{
    AppendArgs, DType, DecodeArgs, PlanArgs, PrefillArgs, Queries, Stream, View, append_kv,
};

use super::memory::Memory;
use super::{Workload, bf16, close, from_bf16};

/// A workload in the memory of a device.
pub struct Server<'m, M: Memory> {
    pub memory: &'m M,
    pub work: Workload,
    pub q: u64,
    pub cache: u64,
    pub block_table: u64,
    pub seq_lens: u64,
    pub qo_indptr: u64,
    pub out: u64,
    pub lse: u64,
    pub stream: Stream,
}

impl<'m, M: Memory> Server<'m, M> {
    pub fn new(memory: &'m M, work: Workload, stream: Stream) -> Self {
        let rows = work.tokens() * work.heads;
        let server = Self {
            q: memory.upload(&work.q.iter().copied().map(bf16).collect::<Vec<u16>>()),
            // Every byte 0xff is a NaN: what is not appended must not be seen.
            cache: memory.upload(&vec![0xffff_u16; work.num_pages * work.page_size * 576]),
            block_table: memory.upload(&work.block_table),
            seq_lens: memory.upload(&work.seq_lens),
            qo_indptr: memory.upload(&work.qo_indptr()),
            out: memory.upload(&vec![0x7fff_u16; rows * 512]),
            lse: memory.upload(&vec![f32::NAN; rows]),
            memory,
            work,
            stream,
        };
        server.append();
        server
    }

    pub fn view(&self, ptr: u64, dtype: DType, shape: &[usize]) -> View {
        let shape: Vec<i64> = shape.iter().map(|&dim| dim as i64).collect();
        // SAFETY: the memory is live as long as `memory`, and of this shape.
        unsafe { View::contiguous(ptr as *const _, dtype, self.memory.device(), &shape) }
    }

    pub fn cache_view(&self) -> View {
        self.view(
            self.cache,
            DType::Bf16,
            &[self.work.num_pages, self.work.page_size, 576],
        )
    }

    /// Writes every token of every request, in one call, latents and rotary parts apart.
    fn append(&self) {
        let (mut kv_c, mut k_pe, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        for (request, tokens) in self.work.keys.iter().enumerate() {
            for (token, row) in tokens.iter().enumerate() {
                kv_c.extend(row[..512].iter().copied().map(bf16));
                k_pe.extend(row[512..].iter().copied().map(bf16));
                slots.push(self.work.slot(request, token));
            }
        }
        slots.push(-1); // a token that is not to be kept
        kv_c.extend([0u16; 512]);
        k_pe.extend([0u16; 64]);
        let tokens = slots.len();
        let args = AppendArgs {
            stream: self.stream,
            ..AppendArgs::new(
                self.view(self.memory.upload(&kv_c), DType::Bf16, &[tokens, 512]),
                Some(self.view(self.memory.upload(&k_pe), DType::Bf16, &[tokens, 64])),
                self.cache_view().into(),
                self.view(self.memory.upload(&slots), DType::I64, &[tokens]),
            )
        };
        // SAFETY: all memory is live until `memory` is dropped.
        unsafe { append_kv(&args).unwrap() };
    }

    pub fn args(&self) -> DecodeArgs<'static> {
        let Workload {
            batch,
            heads,
            max_pages,
            ..
        } = self.work;
        let q_len = self.work.q_lens[0];
        DecodeArgs {
            stream: self.stream,
            ..DecodeArgs::new(
                self.view(self.q, DType::Bf16, &[batch, q_len, heads, 576])
                    .into(),
                self.cache_view().into(),
                self.view(self.block_table, DType::I32, &[batch, max_pages]),
                self.view(self.seq_lens, DType::I32, &[batch]),
                self.view(self.out, DType::Bf16, &[batch, q_len, heads, 512]),
                self.view(self.lse, DType::F32, &[batch, q_len, heads]),
            )
        }
    }

    /// A prefill of the same queries, whatever their lengths.
    pub fn prefill_args(&self) -> PrefillArgs<'static> {
        let Workload {
            batch,
            heads,
            max_pages,
            ..
        } = self.work;
        let tokens = self.work.tokens();
        PrefillArgs {
            stream: self.stream,
            ..PrefillArgs::new(
                self.view(self.q, DType::Bf16, &[tokens, heads, 576]).into(),
                self.cache_view().into(),
                self.view(self.block_table, DType::I32, &[batch, max_pages]),
                self.lens_view(),
                self.indptr_view(),
                self.view(self.out, DType::Bf16, &[tokens, heads, 512]),
                self.view(self.lse, DType::F32, &[tokens, heads]),
            )
        }
    }

    pub fn indptr_view(&self) -> View {
        self.view(self.qo_indptr, DType::I32, &[self.work.batch + 1])
    }

    pub fn workspace(&self, bytes: u64) -> View {
        let ptr = self.memory.upload(&vec![0xa5u8; bytes as usize]);
        self.view(ptr, DType::U8, &[bytes as usize])
    }

    pub fn plan_args(&self) -> PlanArgs {
        let work = &self.work;
        PlanArgs {
            queries: Queries::Uniform {
                q_len: work.q_lens[0] as i64,
            },
            page_size: work.page_size as i64,
            ..PlanArgs::new(self.memory.device(), work.batch as i64, work.heads as i64)
        }
    }

    pub fn lens_view(&self) -> View {
        self.view(self.seq_lens, DType::I32, &[self.work.batch])
    }

    /// The outputs are the reference's for these lengths.
    pub fn assert_right(&self, seq_lens: &[i32], what: &str) {
        self.assert_outputs(&self.work.attend(seq_lens), what);
    }

    pub fn assert_outputs(&self, expected: &(Vec<f64>, Vec<f64>), what: &str) {
        let rows = self.work.tokens() * self.work.heads;
        let out: Vec<u16> = self.memory.download(self.out, rows * 512, self.stream);
        let lse: Vec<f32> = self.memory.download(self.lse, rows, self.stream);
        let out: Vec<f64> = out.into_iter().map(from_bf16).collect();
        close(expected, &out, &lse, what);
    }

    /// Nothing left of an earlier call.
    pub fn poison(&self) {
        let rows = self.work.tokens() * self.work.heads;
        self.memory
            .write(self.out, &vec![0x7fff_u16; rows * 512], self.stream);
        self.memory
            .write(self.lse, &vec![f32::NAN; rows], self.stream);
    }
}
