//! The arguments of the operations on indices, checked.

use crate::check::{Access, Arg, Last};
use crate::dtype::{DType, Device};
use crate::error::{Error, Result};
use crate::indices::{CombineArgs, ToPhysicalArgs, WindowArgs};
use crate::overlap::apart;
use crate::problem::Strided;
use crate::problem_indices::{CombineProblem, Ints, Pages, ToPhysicalProblem, WindowProblem};
use crate::view::View;

type On<'a> = (Device, &'a str);

/// Of a row: warps of the kernels, which count in int32, look up to 511 entries beyond its end (kernels/indices.cu).
const MOST_ENTRIES: i64 = i32::MAX as i64 - 511;

pub(crate) fn to_physical(args: &ToPhysicalArgs) -> Result<ToPhysicalProblem> {
    let indices = Arg::new("indices", &args.indices);
    let shape = indices.rank(&[2, 3], "[batch, q_len, topk] or [batch, topk]")?;
    let last = shape.len() - 1;
    at_most_entries(&indices, last)?;
    let wide = indices.dtype(&[DType::I32, DType::I64], "")? == DType::I64;
    indices.memory(Last::Any, Access::Read)?;
    let on = (args.indices.device(), "indices");
    let pages = pages(
        &args.block_table,
        args.page_size,
        on,
        (shape[0], "the batch of indices"),
    )?;
    let out = Arg::new("out", &args.out);
    out.exactly(shape, "indices")?;
    out.dtype(&[DType::I32], "")?;
    out.device(on.0, on.1)?;
    out.memory(Last::Unit, Access::Write)?;
    let table = Arg::new("block_table", &args.block_table);
    apart(1, &[Some(out), Some(indices), Some(table)])?;
    let tokens = if last == 2 { shape[1] } else { 1 };
    Ok(ToPhysicalProblem {
        device: on.0,
        dims: [shape[0], tokens, shape[last]].map(|dim| dim as i32),
        by_token: last == 2,
        indices: Ints {
            values: with_tokens(&indices),
            wide,
        },
        pages,
        out: {
            let Strided { ptr, strides } = with_tokens(&out);
            let strides = [strides[0], strides[1]];
            Strided { ptr, strides }
        },
        stream: args.stream,
    })
}

/// Dimension `axis` is as many entries as a row may have.
fn at_most_entries(arg: &Arg<'_>, axis: usize) -> Result<()> {
    if arg.shape()[axis] <= MOST_ENTRIES {
        return Ok(());
    }
    let value = format!("of shape {}", arg.view.shape());
    let rule = format!("dimension {axis} is at most {MOST_ENTRIES}");
    Err(Error::invalid(arg.name, value, rule))
}

/// Strides of request, token, entry; a shape without tokens has one of each request.
fn with_tokens(arg: &Arg<'_>) -> Strided<3> {
    match arg.shape().len() {
        3 => arg.strided(),
        _ => {
            let Strided { ptr, strides } = arg.strided::<2>();
            let strides = [strides[0], 0, strides[1]];
            Strided { ptr, strides }
        }
    }
}

fn pages(view: &View, page_size: i64, on: On<'_>, batch: (i64, &str)) -> Result<Pages> {
    number("page_size", page_size)?;
    let table = Arg::new("block_table", view);
    let shape = table.rank(&[2], "[batch, max_pages]")?;
    table.dim(0, batch.0, batch.1)?;
    table.dtype(&[DType::I32], "")?;
    table.device(on.0, on.1)?;
    table.memory(Last::Unit, Access::Read)?;
    Ok(Pages {
        block_table: table.strided(),
        batch: shape[0] as i32,
        max_pages: shape[1] as i32,
        page_size: page_size as i32,
    })
}

/// A count of at least one that int32 holds.
fn number(name: &'static str, value: i64) -> Result<i32> {
    if (1..=i64::from(i32::MAX)).contains(&value) {
        return Ok(value as i32);
    }
    Err(Error::invalid(
        name,
        value,
        format!("between 1 and {}", i32::MAX),
    ))
}

pub(crate) fn window(args: &WindowArgs) -> Result<WindowProblem> {
    let on = (args.seq_lens.device(), "seq_lens");
    let seq_lens = Arg::new("seq_lens", &args.seq_lens);
    let batch = seq_lens.rank(&[1], "[batch]")?[0];
    let like = "the batch of seq_lens";
    let i32s = |name, view, len: Option<i64>, access| {
        vector(
            &Arg::new(name, view),
            &[DType::I32],
            len.map(|len| (len, like)),
            on,
            access,
        )
    };
    let out = Arg::new("out", &args.out);
    let tokens = out.rank(&[1], "[tokens]")?[0];
    let offsets = Arg::new("offsets", &args.offsets);
    let entries = Some((batch + 1, "the batch of seq_lens + 1"));
    let problem = WindowProblem {
        device: on.0,
        seq_lens: i32s("seq_lens", &args.seq_lens, None, Access::Read)?.values,
        query_lens: i32s("query_lens", &args.query_lens, Some(batch), Access::Read)?.values,
        pages: pages(&args.block_table, args.page_size, on, (batch, like))?,
        window: number("window", args.window)?,
        tokens: tokens as i32,
        out: i32s("out", &args.out, None, Access::Write)?.values,
        offsets: vector(&offsets, &[DType::I64], entries, on, Access::Write)?.values,
        first_pos: i32s("first_pos", &args.first_pos, Some(batch), Access::Write)?.values,
        stream: args.stream,
    };
    let given = [
        out,
        offsets,
        Arg::new("first_pos", &args.first_pos),
        seq_lens,
        Arg::new("query_lens", &args.query_lens),
        Arg::new("block_table", &args.block_table),
    ];
    apart(3, &given.map(Some))?;
    Ok(problem)
}

/// One dimension of integers.
fn vector(
    arg: &Arg<'_>,
    types: &[DType],
    len: Option<(i64, &str)>,
    on: On<'_>,
    access: Access,
) -> Result<Ints<1>> {
    arg.rank(&[1], "one dimension")?;
    if let Some((len, like)) = len {
        arg.dim(0, len, like)?;
    }
    let wide = arg.dtype(types, "")? == DType::I64;
    arg.device(on.0, on.1)?;
    arg.memory(Last::Any, access)?;
    Ok(Ints {
        values: arg.strided(),
        wide,
    })
}

pub(crate) fn combine(args: &CombineArgs) -> Result<CombineProblem> {
    let on = (args.topk_indices.device(), "topk_indices");
    let topk = Arg::new("topk_indices", &args.topk_indices);
    let shape = topk.rank(&[2], "[tokens, topk]")?;
    topk.dtype(&[DType::I32], "")?;
    topk.memory(Last::Unit, Access::Read)?;
    let ratio = number("ratio", args.ratio)?;
    let window = number("window", args.window)?;
    let (tokens, batch) = (
        shape[0],
        Arg::new("first_pos", &args.first_pos).rank(&[1], "[batch]")?[0],
    );
    let ints = |name, view, len, like| {
        let types = [DType::I32, DType::I64];
        vector(
            &Arg::new(name, view),
            &types,
            Some((len, like)),
            on,
            Access::Read,
        )
    };
    let of_tokens = |name, view| ints(name, view, tokens, "the tokens of topk_indices");
    let of_requests = |name, view| ints(name, view, batch, "the batch of first_pos");
    let out = Arg::new("out", &args.out);
    let width = out.rank(&[2], "[tokens, width]")?[1];
    out.dim(0, tokens, "the tokens of topk_indices")?;
    at_most_entries(&out, 1)?;
    let needed = shape[1] + i64::from(window);
    if width < needed {
        let value = format!("of shape {}", args.out.shape());
        let rule = format!("dimension 1 is at least {needed}, topk + window");
        return Err(Error::invalid("out", value, rule));
    }
    out.dtype(&[DType::I32], "")?;
    out.device(on.0, on.1)?;
    out.memory(Last::Unit, Access::Write)?;
    let lengths = Arg::new("lengths", &args.lengths);
    let of_lengths = Some((tokens, "the tokens of topk_indices"));
    let problem = CombineProblem {
        device: on.0,
        tokens: tokens as i32,
        batch: batch as i32,
        topk_indices: topk.strided(),
        topk: shape[1] as i32,
        positions: of_tokens("positions", &args.positions)?,
        request_ids: of_tokens("request_ids", &args.request_ids)?,
        ratio,
        window,
        compressed_base: of_requests("compressed_base", &args.compressed_base)?,
        window_base: of_requests("window_base", &args.window_base)?,
        first_pos: of_requests("first_pos", &args.first_pos)?,
        out: out.strided(),
        width: width as i32,
        lengths: vector(&lengths, &[DType::I32], of_lengths, on, Access::Write)?.values,
        stream: args.stream,
    };
    let given = [
        out,
        lengths,
        topk,
        Arg::new("positions", &args.positions),
        Arg::new("request_ids", &args.request_ids),
        Arg::new("compressed_base", &args.compressed_base),
        Arg::new("window_base", &args.window_base),
        Arg::new("first_pos", &args.first_pos),
    ];
    apart(2, &given.map(Some))?;
    Ok(problem)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::Stream;

    /// Of memory that nobody touches, each at a place of its own.
    fn i32s(place: usize, shape: &[i64]) -> View {
        let ptr = std::ptr::without_provenance((place + 1) << 40);
        // SAFETY: the check neither reads nor writes there.
        unsafe { View::contiguous(ptr, DType::I32, Device::Cpu, shape) }
    }

    #[test]
    fn rows_are_so_short_that_kernels_can_count_beyond_their_ends() {
        let to_physical = |topk: i64| {
            to_physical(&ToPhysicalArgs {
                indices: i32s(0, &[1, 1, topk]),
                block_table: i32s(1, &[1, 1]),
                page_size: 64,
                out: i32s(2, &[1, 1, topk]),
                stream: Stream::default(),
            })
        };
        let combine = |width: i64| {
            let one = i32s(0, &[1]);
            combine(&CombineArgs {
                topk_indices: i32s(1, &[1, 8]),
                positions: one,
                request_ids: one,
                ratio: 4,
                window: 8,
                compressed_base: one,
                window_base: one,
                first_pos: one,
                out: i32s(2, &[1, width]),
                lengths: i32s(3, &[1]),
                stream: Stream::default(),
            })
        };
        assert!(to_physical(MOST_ENTRIES).is_ok() && combine(MOST_ENTRIES).is_ok());
        let refused = [
            to_physical(MOST_ENTRIES + 1).err(),
            combine(i32::MAX.into()).err(),
        ];
        let said = refused.map(|error| error.map(|error| error.to_string()).unwrap_or_default());
        assert!(
            said[0].contains("indices") && said[0].contains("dimension 2 is at most 2147483136"),
            "{said:?}"
        );
        assert!(
            said[1].contains("out") && said[1].contains("dimension 1 is at most 2147483136"),
            "{said:?}"
        );
    }
}
