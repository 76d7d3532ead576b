//! Checks of rows that come as one tensor or as the pair (512, 64), and of page tables.

use crate::check::{Access, Arg, Last};
use crate::dtype::{DType, Device};
use crate::error::{Error, Result};
use crate::plan_args::{PlanArgs, Queries};
use crate::problem::{NOPE_DIM, PageTable, ROPE_DIM, Strided, TwoParts};
use crate::view::{Parts, View};

/// Names of a two-part argument: whole, latent part, rotary part.
pub(crate) type PartNames = [&'static str; 3];

pub(crate) const Q: PartNames = ["q", "q[0]", "q[1]"];
pub(crate) const KV_CACHE: PartNames = ["kv_cache", "kv_cache[0]", "kv_cache[1]"];
pub(crate) const CACHE: PartNames = ["cache", "cache[0]", "cache[1]"];
pub(crate) const KV: PartNames = ["kv", "kv[0]", "kv[1]"];
pub(crate) const OUT: PartNames = ["out", "out[0]", "out[1]"];

/// The tensor that leads: the only one, or the latent part.
pub(crate) fn lead<'a>(parts: &'a Parts, names: &PartNames) -> Arg<'a> {
    match parts {
        Parts::One(view) => Arg::new(names[0], view),
        Parts::Two(nope, _) => Arg::new(names[1], nope),
    }
}

/// Its one or two tensors.
pub(crate) fn each<'a>(parts: &'a Parts, names: &PartNames) -> [Option<Arg<'a>>; 2] {
    let second = match parts {
        Parts::One(_) => None,
        Parts::Two(_, rope) => Some(Arg::new(names[2], rope)),
    };
    [Some(lead(parts, names)), second]
}

/// An argument that need not be there.
pub(crate) fn named<'a>(name: &'static str, view: Option<&'a View>) -> Option<Arg<'a>> {
    view.map(|view| Arg::new(name, view))
}

/// Ranks, widths, and that both parts agree in all but their width; then their memory. `layout` describes
/// the dimensions before the last.
pub(crate) fn rows<const N: usize>(
    parts: &Parts,
    names: &PartNames,
    ranks: &[usize],
    layout: &str,
    access: Access,
) -> Result<TwoParts<N>> {
    let lead = lead(parts, names);
    match parts {
        Parts::One(_) => {
            let shape = lead.rank(ranks, format_args!("[{layout}, 576] or [{layout}, 512]"))?;
            let width = shape[shape.len() - 1];
            if width != NOPE_DIM + ROPE_DIM && width != NOPE_DIM {
                return Err(width_error(&lead, "576 (512 and 64 rotary) or 512"));
            }
            lead.memory(Last::Rows, access)?;
            let nope: Strided<N> = strided_rows(&lead);
            let ptr = nope
                .ptr
                .wrapping_add(NOPE_DIM as u64 * lead.view.dtype().size());
            let rope = (width > NOPE_DIM).then_some(Strided { ptr, ..nope });
            Ok(TwoParts { nope, rope })
        }
        Parts::Two(_, rope) => {
            let rope = Arg::new(names[2], rope);
            let shape = lead.rank(ranks, format_args!("[{layout}, 512]"))?;
            let last = shape.len() - 1;
            if shape[last] != NOPE_DIM {
                return Err(width_error(&lead, "512"));
            }
            rope.rank(&[shape.len()], format_args!("[{layout}, 64]"))?;
            (0..last).try_for_each(|axis| {
                rope.dim(axis, shape[axis], format_args!("as in {}", names[1]))
            })?;
            rope.dim(last, ROPE_DIM, "the width of a rotary row")?;
            rope.dtype(&[lead.view.dtype()], format_args!(", as {} is", names[1]))?;
            rope.device(lead.view.device(), names[1])?;
            lead.memory(Last::Rows, access)?;
            rope.memory(Last::Rows, access)?;
            Ok(TwoParts {
                nope: strided_rows(&lead),
                rope: Some(strided_rows(&rope)),
            })
        }
    }
}

/// The strides of the dimensions before the last.
fn strided_rows<const N: usize>(arg: &Arg<'_>) -> Strided<N> {
    let mut strided = arg.strided::<N>();
    // A shape without a head dimension has one stride less; the width's own is no row stride.
    strided.strides[(arg.shape().len() - 1).min(N)..].fill(0);
    strided
}

fn width_error(arg: &Arg<'_>, rule: &str) -> Error {
    let value = format!("of shape {}", arg.view.shape());
    Error::invalid(arg.name, value, format!("the last dimension is {rule}"))
}

/// `block_table [batch, max_pages]` and `seq_lens [batch]`, int32 on `device`. `batch` is that of another
/// argument where there is one.
pub(crate) fn page_table(
    block_table: &View,
    seq_lens: &View,
    device: (Device, &str),
    batch: Option<(i64, &str)>,
) -> Result<PageTable> {
    let table = Arg::new("block_table", block_table);
    let shape = table.rank(&[2], "[batch, max_pages]")?;
    if let Some((batch, like)) = batch {
        table.dim(0, batch, like)?;
    }
    table.dtype(&[DType::I32], "")?;
    table.device(device.0, device.1)?;
    table.memory(Last::Unit, Access::Read)?;
    let (lens, like) = (Arg::new("seq_lens", seq_lens), "the batch of block_table");
    self::seq_lens(&lens, device, (shape[0], like))?;
    Ok(PageTable {
        block_table: table.strided(),
        seq_lens: lens.strided(),
        batch: shape[0] as i32,
        max_pages: shape[1] as i32,
    })
}

/// `[batch]` int32 on `device`.
pub(crate) fn seq_lens(lens: &Arg<'_>, device: (Device, &str), batch: (i64, &str)) -> Result<()> {
    lens.rank(&[1], "[batch]")?;
    lens.dim(0, batch.0, batch.1)?;
    lens.dtype(&[DType::I32], "")?;
    lens.device(device.0, device.1)?;
    lens.memory(Last::Any, Access::Read)
}

/// The query tokens that have lists of keys.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ListTokens {
    OfRequests { batch: i64, q_len: i64 },
    All { num_tokens: i64 },
}

impl ListTokens {
    /// Of a plan, if it is for lists.
    pub fn of(args: &PlanArgs) -> Option<Self> {
        let batch = args.batch;
        match args.queries {
            Queries::Sparse { q_len, .. } => Some(Self::OfRequests { batch, q_len }),
            Queries::SparsePrefill { num_tokens, .. } => Some(Self::All { num_tokens }),
            Queries::Uniform { .. } | Queries::Ragged { .. } => None,
        }
    }

    /// `[batch, q_len]`, with a batch of 1 for tokens without requests.
    pub fn size(self) -> [usize; 2] {
        match self {
            Self::OfRequests { batch, q_len } => [batch, q_len].map(|dim| dim as usize),
            Self::All { num_tokens } => [1, num_tokens as usize],
        }
    }

    /// Where an argument has what is one token's.
    pub fn place(self, request: usize, token: usize) -> Vec<usize> {
        match self {
            Self::OfRequests { .. } => vec![request, token],
            Self::All { .. } => vec![token],
        }
    }
}

/// How many entries of each list count, int32 on `device`: `[batch]` or `[batch, q_len]`; `[num_tokens]` for
/// tokens without requests. Returned as `[batch, q_len]`, with a batch of 1 for those.
pub(crate) fn list_lens(
    lens: &Arg<'_>,
    device: (Device, &str),
    tokens: ListTokens,
) -> Result<Strided<2>> {
    let strided = match tokens {
        ListTokens::OfRequests { batch, q_len } => {
            let shape = lens.rank(&[1, 2], "[batch] or [batch, q_len]")?;
            lens.dim(0, batch, "the batch")?;
            if shape.len() == 2 {
                lens.dim(1, q_len, "the query tokens of a request")?;
            }
            lens.strided()
        }
        ListTokens::All { num_tokens } => {
            lens.rank(&[1], "[num_tokens]")?;
            lens.dim(0, num_tokens, "the query tokens")?;
            let Strided {
                ptr,
                strides: [step],
            } = lens.strided::<1>();
            let strides = [0, step];
            Strided { ptr, strides }
        }
    };
    lens.dtype(&[DType::I32], "")?;
    lens.device(device.0, device.1)?;
    lens.memory(Last::Any, Access::Read)?;
    Ok(strided)
}

/// `[batch + 1]` int32 on `device`.
pub(crate) fn qo_indptr(
    indptr: &Arg<'_>,
    device: (Device, &str),
    batch: (i64, &str),
) -> Result<()> {
    indptr.rank(&[1], "[batch + 1]")?;
    indptr.dim(0, batch.0 + 1, batch.1)?;
    indptr.dtype(&[DType::I32], "")?;
    indptr.device(device.0, device.1)?;
    indptr.memory(Last::Any, Access::Read)
}
