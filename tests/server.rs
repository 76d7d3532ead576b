//! The crate as a server uses it: its own memory by raw pointers, its own stream, no Python.
//!
//! The same scenario runs on the CPU backend and, with `--ignored`, on CUDA device 0: requests of different
//! lengths in shuffled pages, NaN in every slot nobody attends, a plan shared by calls and updated, and on
//! CUDA a captured graph that is replayed after the lengths have changed.

mod reference;

use ferromla::{
    AppendArgs, DType, DecodeArgs, GatherArgs, GatherSource, MergeArgs, Plan, PlanArgs, Stream,
    View, append_kv, decode, gather_kv, merge_states, workspace_bytes,
};
use reference::memory::{Host, Memory};
use reference::{Workload, bf16, close, from_bf16};

/// A workload in the memory of a device.
struct Server<'m, M: Memory> {
    memory: &'m M,
    work: Workload,
    q: u64,
    cache: u64,
    block_table: u64,
    seq_lens: u64,
    out: u64,
    lse: u64,
    stream: Stream,
}

impl<'m, M: Memory> Server<'m, M> {
    fn new(memory: &'m M, work: Workload, stream: Stream) -> Self {
        let rows = work.batch * work.q_len * work.heads;
        let server = Self {
            q: memory.upload(&work.q.iter().copied().map(bf16).collect::<Vec<u16>>()),
            // Every byte 0xff is a NaN: what is not appended must not be seen.
            cache: memory.upload(&vec![0xffff_u16; work.num_pages * work.page_size * 576]),
            block_table: memory.upload(&work.block_table),
            seq_lens: memory.upload(&work.seq_lens),
            out: memory.upload(&vec![0x7fff_u16; rows * 512]),
            lse: memory.upload(&vec![f32::NAN; rows]),
            memory,
            work,
            stream,
        };
        server.append();
        server
    }

    fn view(&self, ptr: u64, dtype: DType, shape: &[usize]) -> View {
        let shape: Vec<i64> = shape.iter().map(|&dim| dim as i64).collect();
        // SAFETY: the memory is live as long as `memory`, and of this shape.
        unsafe { View::contiguous(ptr as *const _, dtype, self.memory.device(), &shape) }
    }

    fn cache_view(&self) -> View {
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
            kv_c: self.view(self.memory.upload(&kv_c), DType::Bf16, &[tokens, 512]),
            k_pe: Some(self.view(self.memory.upload(&k_pe), DType::Bf16, &[tokens, 64])),
            kv_cache: self.cache_view().into(),
            slots: self.view(self.memory.upload(&slots), DType::I64, &[tokens]),
            kv_format: None,
            stream: self.stream,
        };
        // SAFETY: all memory is live until `memory` is dropped.
        unsafe { append_kv(&args).unwrap() };
    }

    fn args(&self) -> DecodeArgs<'static> {
        let Workload {
            batch,
            q_len,
            heads,
            max_pages,
            ..
        } = self.work;
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

    fn workspace(&self, bytes: u64) -> View {
        let ptr = self.memory.upload(&vec![0xa5u8; bytes as usize]);
        self.view(ptr, DType::U8, &[bytes as usize])
    }

    fn plan_args(&self) -> PlanArgs {
        let work = &self.work;
        PlanArgs {
            q_len: work.q_len as i64,
            page_size: work.page_size as i64,
            ..PlanArgs::new(self.memory.device(), work.batch as i64, work.heads as i64)
        }
    }

    fn lens_view(&self) -> View {
        self.view(self.seq_lens, DType::I32, &[self.work.batch])
    }

    /// The outputs are the reference's for these lengths.
    fn assert_right(&self, seq_lens: &[i32], what: &str) {
        let rows = self.work.batch * self.work.q_len * self.work.heads;
        let out: Vec<u16> = self.memory.download(self.out, rows * 512, self.stream);
        let lse: Vec<f32> = self.memory.download(self.lse, rows, self.stream);
        let out: Vec<f64> = out.into_iter().map(from_bf16).collect();
        close(&self.work.attend(seq_lens), &out, &lse, what);
    }

    /// Nothing left of an earlier call.
    fn poison(&self) {
        let rows = self.work.batch * self.work.q_len * self.work.heads;
        self.memory
            .write(self.out, &vec![0x7fff_u16; rows * 512], self.stream);
        self.memory
            .write(self.lse, &vec![f32::NAN; rows], self.stream);
    }
}

fn decode_without_a_plan<M: Memory>(memory: &M, stream: Stream) {
    for causal in [true, false] {
        let server = Server::new(
            memory,
            Workload {
                causal,
                ..Workload::new(2, 16)
            },
            stream,
        );
        for (num_splits, batch_invariant) in [
            (None, false),
            (Some(1), false),
            (Some(3), false),
            (None, true),
        ] {
            let mut args = DecodeArgs {
                causal,
                num_splits,
                batch_invariant,
                ..server.args()
            };
            args.workspace = Some(server.workspace(args.workspace_bytes().unwrap()));
            server.poison();
            // SAFETY: all memory is live until `memory` is dropped.
            unsafe { decode(&args).unwrap() };
            let what =
                format!("causal {causal}, {num_splits:?} splits, invariant {batch_invariant}");
            server.assert_right(&server.work.seq_lens, &what);
        }
    }
}

fn one_plan_for_many_calls<M: Memory>(memory: &M, stream: Stream) {
    let server = Server::new(memory, Workload::new(1, 61), stream);
    let plan_args = server.plan_args();
    let workspace = server.workspace(workspace_bytes(&plan_args).unwrap());
    // SAFETY: all memory is live until `memory` is dropped.
    let plan = unsafe { Plan::new(&plan_args, &server.lens_view(), workspace, stream).unwrap() };
    let args = DecodeArgs {
        plan: Some(&plan),
        ..server.args()
    };
    for _layer in 0..3 {
        server.poison();
        // SAFETY: as above.
        unsafe { decode(&args).unwrap() };
        server.assert_right(&server.work.seq_lens, "one plan");
    }
    let fewer: Vec<i32> = server.work.seq_lens.iter().map(|len| len / 2).collect();
    server.memory.write(server.seq_lens, &fewer, stream);
    server.poison();
    // SAFETY: as above.
    unsafe {
        plan.update(&server.lens_view(), stream).unwrap();
        decode(&args).unwrap();
    }
    server.assert_right(&fewer, "an updated plan");
}

/// Half of the keys twice, merged: attention over a multiset, whose output is that of the half.
fn merge_is_exact<M: Memory>(memory: &M, stream: Stream) {
    let server = Server::new(
        memory,
        Workload {
            causal: false,
            ..Workload::new(1, 16)
        },
        stream,
    );
    let mut args = DecodeArgs {
        causal: false,
        ..server.args()
    };
    args.workspace = Some(server.workspace(args.workspace_bytes().unwrap()));
    let merge = MergeArgs {
        out_a: args.out,
        lse_a: args.lse,
        out_b: args.out,
        lse_b: args.lse,
        out: args.out,
        lse: args.lse,
        stream,
    };
    // SAFETY: all memory is live until `memory` is dropped; the outputs are exactly inputs.
    unsafe {
        decode(&args).unwrap();
        merge_states(&merge).unwrap();
    }
    let rows = server.work.batch * server.work.heads;
    let lse: Vec<f32> = memory.download(server.lse, rows, stream);
    memory.write(
        server.lse,
        &lse.iter().map(|x| x - 2f32.ln()).collect::<Vec<_>>(),
        stream,
    );
    server.assert_right(&server.work.seq_lens, "merged with itself");
}

fn gather_gives_back_what_was_appended<M: Memory>(memory: &M, stream: Stream) {
    let server = Server::new(memory, Workload::new(1, 16), stream);
    let work = &server.work;
    let tokens: usize = work.seq_lens.iter().map(|&len| len as usize).sum::<usize>() + 1;
    let (out, offsets) = (
        memory.upload(&vec![0x7fff_u16; tokens * 576]),
        memory.upload(&vec![-1i64; work.batch + 1]),
    );
    let args = GatherArgs {
        cache: server.cache_view().into(),
        source: GatherSource::Pages {
            block_table: server.view(
                server.block_table,
                DType::I32,
                &[work.batch, work.max_pages],
            ),
            seq_lens: server.lens_view(),
            offsets_out: server.view(offsets, DType::I64, &[work.batch + 1]),
        },
        out: server.view(out, DType::Bf16, &[tokens, 576]),
        kv_format: None,
        stream,
    };
    // SAFETY: all memory is live until `memory` is dropped.
    unsafe { gather_kv(&args).unwrap() };
    let gathered: Vec<u16> = memory.download(out, tokens * 576, stream);
    let mut expected: Vec<u16> = work
        .keys
        .iter()
        .flatten()
        .flatten()
        .copied()
        .map(bf16)
        .collect();
    expected.extend([0u16; 576]); // the row past the last token
    assert!(gathered == expected);
    let offsets: Vec<i64> = memory.download(offsets, work.batch + 1, stream);
    assert_eq!(offsets.last(), Some(&(tokens as i64 - 1)));
}

fn scenario<M: Memory>(memory: &M, stream: Stream) {
    decode_without_a_plan(memory, stream);
    one_plan_for_many_calls(memory, stream);
    merge_is_exact(memory, stream);
    gather_gives_back_what_was_appended(memory, stream);
}

#[test]
fn a_server_on_the_cpu() {
    scenario(&Host::default(), Stream::default());
}

#[cfg(feature = "cuda")]
mod on_cuda {
    use super::*;
    use ferromla::Device;
    use reference::cuda::{Gpu, Graph};

    /// The server's lengths, in `host`'s memory.
    fn host_lens(host: &Host, server: &Server<'_, Gpu>) -> View {
        let lens = host.upload(&server.work.seq_lens);
        let shape = [server.work.batch as i64];
        // SAFETY: the memory lives as long as `host`, and has been made of as many lengths.
        unsafe { View::contiguous(lens as *const _, DType::I32, Device::Cpu, &shape) }
    }

    #[test]
    #[ignore = "needs a Hopper GPU"]
    fn a_server_on_a_gpu() {
        let gpu = Gpu::new();
        scenario(&gpu, gpu.stream());
        scenario(&gpu, Stream::default());
    }

    #[test]
    #[ignore = "needs a Hopper GPU"]
    fn host_and_device_plan_the_same() {
        let gpu = Gpu::new();
        let server = Server::new(&gpu, Workload::new(2, 16), gpu.stream());
        let plan_args = server.plan_args();
        let bytes = workspace_bytes(&plan_args).unwrap();
        let host = Host::default();
        let lens = host_lens(&host, &server);
        let workspace = server.workspace(bytes);
        // SAFETY: all memory is live.
        let plan = unsafe { Plan::new(&plan_args, &lens, workspace, gpu.stream()).unwrap() };
        let args = DecodeArgs {
            plan: Some(&plan),
            ..server.args()
        };
        // SAFETY: as above.
        unsafe { decode(&args).unwrap() };
        server.assert_right(&server.work.seq_lens, "planned on the host");
        let by_host: Vec<u8> =
            gpu.download(workspace.ptr(), plan.plan_bytes() as usize, gpu.stream());
        // SAFETY: as above.
        unsafe { plan.update(&server.lens_view(), gpu.stream()).unwrap() };
        let by_device: Vec<u8> =
            gpu.download(workspace.ptr(), plan.plan_bytes() as usize, gpu.stream());
        assert!(
            by_host[..64] == by_device[..64],
            "the plans' headers differ"
        );
    }

    #[test]
    #[ignore = "needs a Hopper GPU"]
    fn a_captured_graph_replays_for_other_lengths() {
        let gpu = Gpu::new();
        let server = Server::new(&gpu, Workload::new(1, 64), gpu.stream());
        let mut args = server.args();
        args.workspace = Some(server.workspace(args.workspace_bytes().unwrap()));
        // SAFETY: all memory is live until the graph has been replayed.
        let graph = Graph::capture(&gpu, || unsafe { decode(&args).unwrap() });
        let fewer: Vec<i32> = server.work.seq_lens.iter().map(|len| len / 3).collect();
        for lens in [&server.work.seq_lens, &fewer] {
            gpu.write(server.seq_lens, lens, gpu.stream());
            server.poison();
            graph.replay();
            server.assert_right(lens, "replayed");
        }
    }

    #[test]
    #[ignore = "needs a Hopper GPU"]
    fn host_lengths_are_refused_in_a_capture() {
        let gpu = Gpu::new();
        let server = Server::new(&gpu, Workload::new(1, 64), gpu.stream());
        let plan_args = server.plan_args();
        let workspace = server.workspace(workspace_bytes(&plan_args).unwrap());
        let host = Host::default();
        let lens = host_lens(&host, &server);
        // SAFETY: all memory is live.
        Graph::capture(&gpu, || unsafe {
            let error = Plan::new(&plan_args, &lens, workspace, gpu.stream()).unwrap_err();
            assert_eq!(error.argument(), Some("seq_lens"), "{error}");
            let plan = Plan::new(&plan_args, &server.lens_view(), workspace, gpu.stream()).unwrap();
            decode(&DecodeArgs {
                plan: Some(&plan),
                ..server.args()
            })
            .unwrap();
        })
        .replay();
        server.assert_right(&server.work.seq_lens, "planned in the graph");
    }
}
