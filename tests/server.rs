//! The crate as a server uses it: its own memory by raw pointers, its own stream, no Python.
//!
//! The same scenario runs on the CPU backend and, with `--ignored`, on CUDA device 0: requests of different
//! lengths in shuffled pages, NaN in every slot nobody attends, a plan shared by calls and updated, and on
//! CUDA a captured graph that is replayed after the lengths have changed.

mod reference;

use ferromla::{
    DType, DecodeArgs, GatherArgs, GatherSource, MergeArgs, Plan, PlanArgs, PrefillArgs, Stream,
    decode, gather_kv, merge_states, prefill, workspace_bytes,
};
use reference::memory::{Host, Memory};
use reference::server::Server;
use reference::{Workload, bf16};

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
        let expected = server.work.attend(&server.work.seq_lens);
        for (num_splits, batch_invariant) in [
            (None, false),
            (Some(1), false),
            (Some(3), false),
            (None, true),
            (Some(3), true),
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
            server.assert_outputs(&expected, &what);
        }
    }
}

fn one_plan_for_many_calls<M: Memory>(memory: &M, stream: Stream) {
    let server = Server::new(memory, Workload::new(1, 61), stream);
    let plan_args = server.plan_args();
    let workspace = server.workspace(workspace_bytes(&plan_args).unwrap());
    // SAFETY: all memory is live until `memory` is dropped.
    let plan =
        unsafe { Plan::new(&plan_args, &server.lens_view(), None, workspace, stream).unwrap() };
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
        plan.update(&server.lens_view(), None, stream).unwrap();
        decode(&args).unwrap();
    }
    server.assert_right(&fewer, "an updated plan");
}

/// Requests of no, one and many query tokens, without a plan and with one that is updated for other tokens.
fn prefill_of_mixed_lengths<M: Memory>(memory: &M, stream: Stream) {
    for causal in [true, false] {
        let work = Workload {
            causal,
            ..Workload::ragged(16)
        };
        let mut server = Server::new(memory, work, stream);
        let expected = server.work.attend(&server.work.seq_lens);
        for (num_splits, batch_invariant) in [(None, false), (Some(3), false), (None, true)] {
            let mut args = PrefillArgs {
                causal,
                num_splits,
                batch_invariant,
                ..server.prefill_args()
            };
            args.workspace = Some(server.workspace(args.workspace_bytes().unwrap()));
            server.poison();
            // SAFETY: all memory is live until `memory` is dropped.
            unsafe { prefill(&args).unwrap() };
            let what = format!("prefill, causal {causal}, {num_splits:?} splits");
            server.assert_outputs(&expected, &what);
        }
        let plan_args = PlanArgs {
            causal,
            max_seq_len: None,
            ..server.prefill_args().plan_args().unwrap()
        };
        let workspace = server.workspace(workspace_bytes(&plan_args).unwrap());
        let (lens, indptr) = (server.lens_view(), server.indptr_view());
        // SAFETY: as above.
        let plan =
            unsafe { Plan::new(&plan_args, &lens, Some(&indptr), workspace, stream).unwrap() };
        for turns in 0..2 {
            server.work.q_lens.rotate_left(turns);
            memory.write(server.qo_indptr, &server.work.qo_indptr(), stream);
            server.poison();
            let args = PrefillArgs {
                causal,
                plan: Some(&plan),
                ..server.prefill_args()
            };
            // SAFETY: as above.
            unsafe {
                plan.update(&lens, Some(&indptr), stream).unwrap();
                prefill(&args).unwrap();
            }
            server.assert_right(&server.work.seq_lens, "prefill with a plan");
        }
    }
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
        kv_scale: None,
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
    prefill_of_mixed_lengths(memory, stream);
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
    use ferromla::{Device, Queries, View};
    use ferromla_schedule::{Merge, PlanHeader, WorkItem};
    use reference::cuda::{Gpu, Graph};

    /// The same integers in `host`'s memory.
    fn on_host(host: &Host, values: &[i32]) -> View {
        let (ptr, shape) = (host.upload(values), [values.len() as i64]);
        // SAFETY: the memory lives as long as `host`, and has been made of as many values.
        unsafe { View::contiguous(ptr as *const _, DType::I32, Device::Cpu, &shape) }
    }

    /// Everything in a plan that is read: header, worker starts, used merges and used items.
    fn used_entries(gpu: &Gpu, workspace: &View, plan: &Plan) -> Vec<Vec<u8>> {
        let bytes: Vec<u8> =
            gpu.download(workspace.ptr(), plan.plan_bytes() as usize, gpu.stream());
        let [workers, merges, items, _] = plan.plan_offsets().map(|offset| offset as usize);
        let count =
            |word: usize| i32::from_le_bytes(bytes[4 * word..][..4].try_into().unwrap()) as usize;
        let (used_items, used_merges) = (count(1), count(2));
        assert!(used_items > 0);
        vec![
            bytes[..size_of::<PlanHeader>()].to_vec(),
            bytes[workers..merges].to_vec(),
            bytes[merges..][..used_merges * size_of::<Merge>()].to_vec(),
            bytes[items..][..used_items * size_of::<WorkItem>()].to_vec(),
        ]
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
        let (gpu, host) = (Gpu::new(), Host::default());
        for ragged in [false, true] {
            for num_splits in [None, Some(3)] {
                let work = if ragged {
                    Workload::ragged(16)
                } else {
                    Workload::new(2, 16)
                };
                let server = Server::new(&gpu, work, gpu.stream());
                let plan_args = PlanArgs {
                    num_splits,
                    max_seq_len: Some(1024),
                    ..if ragged {
                        server.prefill_args().plan_args().unwrap()
                    } else {
                        server.plan_args()
                    }
                };
                plans_are_equal(&gpu, &host, &server, &plan_args);
            }
        }
    }

    /// Plans from host and device lengths, each in memory of zeros, so that gaps between entries are equal too.
    fn plans_are_equal(gpu: &Gpu, host: &Host, server: &Server<'_, Gpu>, plan_args: &PlanArgs) {
        let ragged = matches!(plan_args.queries, Queries::Ragged { .. });
        let bytes = workspace_bytes(plan_args).unwrap() as usize;
        let host_views = (
            on_host(host, &server.work.seq_lens),
            on_host(host, &server.work.qo_indptr()),
        );
        let device_views = (server.lens_view(), server.indptr_view());
        let entries = [host_views, device_views].map(|(lens, indptr)| {
            let workspace = server.view(gpu.upload(&vec![0u8; bytes]), DType::U8, &[bytes]);
            let indptr = ragged.then_some(&indptr);
            // SAFETY: all memory is live.
            let plan =
                unsafe { Plan::new(plan_args, &lens, indptr, workspace, gpu.stream()).unwrap() };
            server.poison();
            // SAFETY: as above.
            unsafe {
                if ragged {
                    let plan = Some(&plan);
                    prefill(&PrefillArgs {
                        plan,
                        ..server.prefill_args()
                    })
                    .unwrap();
                } else {
                    let plan = Some(&plan);
                    decode(&DecodeArgs {
                        plan,
                        ..server.args()
                    })
                    .unwrap();
                }
            }
            server.assert_right(&server.work.seq_lens, "planned on host or device");
            used_entries(gpu, &workspace, &plan)
        });
        assert_eq!(entries[0], entries[1], "{plan_args:?}");
    }

    #[test]
    #[ignore = "needs a Hopper GPU"]
    fn a_captured_prefill_replays_for_other_tokens() {
        let gpu = Gpu::new();
        let mut server = Server::new(&gpu, Workload::ragged(64), gpu.stream());
        let mut args = server.prefill_args();
        args.workspace = Some(server.workspace(args.workspace_bytes().unwrap()));
        // SAFETY: all memory is live until the graph has been replayed.
        let graph = Graph::capture(&gpu, || unsafe { prefill(&args).unwrap() });
        for turns in 0..3 {
            server.work.q_lens.rotate_left(turns);
            gpu.write(server.qo_indptr, &server.work.qo_indptr(), gpu.stream());
            server.poison();
            graph.replay();
            server.assert_right(&server.work.seq_lens, "prefill replayed");
        }
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
        let lens = on_host(&host, &server.work.seq_lens);
        // SAFETY: all memory is live.
        Graph::capture(&gpu, || unsafe {
            let error = Plan::new(&plan_args, &lens, None, workspace, gpu.stream()).unwrap_err();
            assert_eq!(error.argument(), Some("seq_lens"), "{error}");
            let lens = server.lens_view();
            let plan = Plan::new(&plan_args, &lens, None, workspace, gpu.stream()).unwrap();
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
