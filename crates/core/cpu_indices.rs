//! The last step of the operations on indices on the CPU.

use ferromla_cpu::{
    CombineCpu, Ints as CpuInts, PagesCpu, Strided as CpuStrided, ToPhysicalCpu, WindowCpu,
};

use crate::cpu::view;
use crate::error::Result;
use crate::problem::Strided;
use crate::problem_indices::{CombineProblem, Ints, Pages, ToPhysicalProblem, WindowProblem};

fn ints<const N: usize>(from: &Ints<N>, shape: [i32; N]) -> CpuInts<N> {
    if from.wide {
        CpuInts::I64(view(&from.values, shape))
    } else {
        CpuInts::I32(view(&from.values, shape))
    }
}

fn pages(from: &Pages) -> PagesCpu {
    let Strided { ptr, strides } = from.block_table;
    let strides = [strides[0], 1];
    let block_table: CpuStrided<i32, 2> =
        view(&Strided { ptr, strides }, [from.batch, from.max_pages]);
    PagesCpu {
        block_table,
        page_size: from.page_size as usize,
    }
}

/// # Safety
/// As for [`to_physical`](crate::to_physical).
pub(crate) unsafe fn to_physical(problem: &ToPhysicalProblem) -> Result<()> {
    let [batch, q_len, _] = problem.dims;
    let args = ToPhysicalCpu {
        indices: ints(&problem.indices, problem.dims),
        pages: pages(&problem.pages),
        out: view(&problem.out, [batch, q_len]),
    };
    // SAFETY: the caller's promise; shapes and strides have been checked.
    unsafe { ferromla_cpu::to_physical(&args) };
    Ok(())
}

/// # Safety
/// As for [`window_token_ids`](crate::window_token_ids).
pub(crate) unsafe fn window_token_ids(problem: &WindowProblem) -> Result<()> {
    let batch = problem.pages.batch;
    let args = WindowCpu {
        seq_lens: view(&problem.seq_lens, [batch]),
        query_lens: view(&problem.query_lens, [batch]),
        pages: pages(&problem.pages),
        window: problem.window.into(),
        out: view(&problem.out, [problem.tokens]),
        offsets: view(&problem.offsets, [batch + 1]),
        first_pos: view(&problem.first_pos, [batch]),
    };
    // SAFETY: the caller's promise; shapes and strides have been checked.
    unsafe { ferromla_cpu::window_token_ids(&args) };
    Ok(())
}

/// # Safety
/// As for [`combine_topk_window`](crate::combine_topk_window).
pub(crate) unsafe fn combine_topk_window(problem: &CombineProblem) -> Result<()> {
    let (tokens, batch) = ([problem.tokens], [problem.batch]);
    let args = CombineCpu {
        topk_indices: view(&problem.topk_indices, tokens),
        topk: problem.topk as usize,
        positions: ints(&problem.positions, tokens),
        request_ids: ints(&problem.request_ids, tokens),
        ratio: problem.ratio.into(),
        window: problem.window.into(),
        compressed_base: ints(&problem.compressed_base, batch),
        window_base: ints(&problem.window_base, batch),
        first_pos: ints(&problem.first_pos, batch),
        out: view(&problem.out, tokens),
        width: problem.width as usize,
        lengths: view(&problem.lengths, tokens),
    };
    // SAFETY: the caller's promise; shapes and strides have been checked.
    unsafe { ferromla_cpu::combine_topk_window(&args) };
    Ok(())
}
