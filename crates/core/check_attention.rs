//! The arguments of `decode` and `prefill`, checked: views to an [`AttentionProblem`].

use crate::attention::{AttentionArgs, QoIndptr};
use crate::check::{Access, Arg, Last, device_dtype, supported_format};
use crate::check_parts::{KV_CACHE, Q, cache, lead, page_table, qo_indptr, rows};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{
    AttentionProblem, NOPE_DIM, PageTable, PagedCache, QueryTokens, Strided, TwoParts,
};
use crate::view::{Dims, MAX_RANK, Parts, View};

const HALF_TYPES: [DType; 2] = [DType::Bf16, DType::Fp16];

/// `q` by itself.
pub(crate) struct Query {
    pub rows: TwoParts<3>,
    pub dtype: DType,
    /// The shape before the width: `[batch, q_len, heads]`, or `[tokens, heads]` when ragged.
    pub leading: Dims,
    pub heads: i64,
}

pub(crate) fn query(q: &Parts, ragged: bool) -> Result<Query> {
    let lead = lead(q, &Q);
    if lead.view.dtype() == DType::F8E4M3 {
        let rule = "queries are bfloat16 or float16 in this version";
        return Err(Error::unsupported(lead.name, DType::F8E4M3, rule));
    }
    let dtype = lead.dtype(&HALF_TYPES, "")?;
    let rows = if ragged {
        rows::<2>(q, &Q, &[3], "tokens, heads", Access::Read)?.without_requests()
    } else {
        rows::<3>(q, &Q, &[4], "batch, q_len, heads", Access::Read)?
    };
    let leading = &lead.shape()[..lead.shape().len() - 1];
    let axis = leading.len() - 1;
    if leading[axis] < 1 {
        let value = format!("of shape {}", lead.view.shape());
        let rule = format!("dimension {axis}, the query heads, is at least 1");
        return Err(Error::invalid(lead.name, value, rule));
    }
    Ok(Query {
        rows,
        dtype,
        leading: Dims::new(leading),
        heads: leading[axis],
    })
}

/// The shape of `out` for these dimensions of `q`.
pub(crate) fn out_shape(leading: &[i64]) -> Dims {
    let mut shape = [NOPE_DIM; MAX_RANK];
    shape[..leading.len()].copy_from_slice(leading);
    Dims::new(&shape[..=leading.len()])
}

/// Everything but `out`, `lse`, `plan` and `workspace`, which the problem does not have yet.
pub(crate) fn inputs<I: QoIndptr>(args: &AttentionArgs<'_, I>) -> Result<AttentionProblem> {
    if let Some(format) = args.kv_format {
        supported_format(format)?;
    }
    let indptr = args.qo_indptr.view();
    let query = query(&args.q, indptr.is_some())?;
    let q_arg = lead(&args.q, &Q);
    let device = (q_arg.view.device(), q_arg.name);
    device_dtype(q_arg.name, device.0, query.dtype)?;
    let cache = cache(
        &args.kv_cache,
        &KV_CACHE,
        args.kv_format,
        device,
        Access::Read,
    )?;
    fits(args, &query, &cache)?;
    let batch = match indptr {
        None => Some((query.leading[0], "the batch of q")),
        Some(_) => None,
    };
    let table = page_table(&args.block_table, &args.seq_lens, device, batch)?;
    Ok(AttentionProblem {
        device: device.0,
        dtype: query.dtype,
        queries: tokens(indptr, &query.leading, &table, device)?,
        heads: query.heads as i32,
        q: query.rows,
        cache,
        table,
        scale: scale(args.softmax_scale, query.rows.dim())?,
        causal: args.causal,
        attn_sink: attn_sink(args.attn_sink.as_ref(), &q_arg, query.heads)?,
        out: Strided::NONE,
        lse: Strided::NONE,
        stream: args.stream,
    })
}

/// Whose the tokens of a `q` of this shape are.
fn tokens(
    indptr: Option<&View>,
    leading: &Dims,
    table: &PageTable,
    device: (crate::Device, &str),
) -> Result<QueryTokens> {
    let Some(view) = indptr else {
        return Ok(QueryTokens::Uniform {
            q_len: leading[1] as i32,
        });
    };
    let arg = Arg::new("qo_indptr", view);
    let like = "the batch of block_table + 1";
    qo_indptr(&arg, device, (table.batch.into(), like))?;
    Ok(QueryTokens::Ragged {
        tokens: leading[0] as i32,
        indptr: arg.strided(),
    })
}

/// Query and cache belong together: type, width and heads.
fn fits<I>(args: &AttentionArgs<'_, I>, query: &Query, cache: &PagedCache) -> Result<()> {
    let (q, heads) = (&query.rows, query.heads);
    let cache_arg = lead(&args.kv_cache, &KV_CACHE);
    cache_arg.dtype(&[query.dtype], ", as q is")?;
    if q.dim() != cache.rows.dim() {
        let rule = format!("q has rows of {}", q.dim());
        return Err(Error::invalid(
            cache_arg.name,
            format!("of rows of {}", cache.rows.dim()),
            rule,
        ));
    }
    if heads % i64::from(cache.kv_heads) != 0 {
        let rule = format!("the KV heads divide the {heads} heads of q");
        let value = format!("of shape {}", cache_arg.view.shape());
        return Err(Error::invalid(cache_arg.name, value, rule));
    }
    Ok(())
}

/// The factor of the scores.
pub(crate) fn scale(given: Option<f64>, d_qk: i64) -> Result<f64> {
    let scale = given.unwrap_or_else(|| (d_qk as f64).powf(-0.5));
    if scale > 0.0 && ((scale * std::f64::consts::LOG2_E) as f32).is_finite() {
        return Ok(scale);
    }
    Err(Error::invalid(
        "softmax_scale",
        scale,
        "a positive number that float32 holds",
    ))
}

/// The address of `[heads]` float32, or 0.
pub(crate) fn attn_sink(given: Option<&View>, q: &Arg<'_>, heads: i64) -> Result<u64> {
    let Some(view) = given else {
        return Ok(0);
    };
    let sink = Arg::new("attn_sink", view);
    sink.rank(&[1], "[heads]")?;
    sink.dim(0, heads, "the heads of q")?;
    sink.dtype(&[DType::F32], "")?;
    sink.device(q.view.device(), q.name)?;
    sink.memory(Last::Unit, Access::Read)?;
    Ok(view.ptr())
}

/// `out` and `lse`, into the problem.
pub(crate) fn outputs<I>(
    args: &AttentionArgs<'_, I>,
    problem: &mut AttentionProblem,
) -> Result<()> {
    let q = lead(&args.q, &Q);
    problem.out = out(&args.out, &q, problem.dtype)?;
    problem.lse = row_numbers(&Arg::new("lse", &args.lse), &q)?;
    Ok(())
}

/// `out`, of q's shape but 512 wide: strides of request (0 where q has no such axis), token, head.
pub(crate) fn out(view: &View, q: &Arg<'_>, dtype: DType) -> Result<Strided<3>> {
    let leading = &q.shape()[..q.shape().len() - 1];
    let out = Arg::new("out", view);
    out.exactly(&out_shape(leading), "q but 512 wide")?;
    out.dtype(&[dtype], ", as q is")?;
    out.device(q.view.device(), q.name)?;
    out.memory(Last::Rows, Access::Write)?;
    Ok(of_rows(&out, leading))
}

/// A float32 output of one number per row of q, in the same way.
pub(crate) fn row_numbers(arg: &Arg<'_>, q: &Arg<'_>) -> Result<Strided<3>> {
    let leading = &q.shape()[..q.shape().len() - 1];
    arg.exactly(leading, "q without its last dimension")?;
    arg.dtype(&[DType::F32], "")?;
    arg.device(q.view.device(), q.name)?;
    arg.memory(Last::Any, Access::Write)?;
    Ok(of_rows(arg, leading))
}

/// Strides of request, token, head for a q with these leading dimensions.
fn of_rows(arg: &Arg<'_>, leading: &[i64]) -> Strided<3> {
    match leading.len() {
        2 => arg.strided::<2>().without_requests(),
        _ => arg.strided(),
    }
}
