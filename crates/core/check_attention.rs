//! The arguments of `decode` and `prefill`, checked: views to an [`AttentionProblem`].

use crate::attention::{AttentionArgs, QScale, QoIndptr};
use crate::check::{Access, Arg, Last, device_dtype};
use crate::check_paged::{CacheArg, Rows, in_reach, positive, positive_f32};
use crate::check_parts::{KV_CACHE, Q, each, lead, named, page_table, qo_indptr, rows};
use crate::dtype::{DType, KvFormat};
use crate::error::{Error, Result};
use crate::overlap::{Taken, apart};
use crate::problem::{
    AttentionProblem, NOPE_DIM, PageTable, PagedCache, QueryScale, QueryTokens, Strided, TwoParts,
    out_dtype,
};
use crate::view::{Dims, MAX_RANK, Parts, View};

const QUERY_TYPES: [DType; 3] = [DType::Bf16, DType::Fp16, DType::F8E4M3];

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
    let dtype = lead.dtype(&QUERY_TYPES, "")?;
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
    let indptr = args.qo_indptr.view();
    let query = query(&args.q, indptr.is_some())?;
    let q_arg = lead(&args.q, &Q);
    let device = (q_arg.view.device(), q_arg.name);
    device_dtype(q_arg.name, device.0, query.dtype)?;
    let cache_arg = CacheArg {
        names: &KV_CACHE,
        parts: &args.kv_cache,
        format_name: "kv_format",
        format: args.kv_format,
        scale: args.kv_scale,
    };
    let cache = cache_arg.check(device, Access::Read)?;
    dense(cache.format)?;
    in_reach(&cache_arg.lead(), &cache, Rows::Anywhere)?;
    fits(&cache_arg.lead(), &query, &cache)?;
    let batch = match indptr {
        None => Some((query.leading[0], "the batch of q")),
        Some(_) => None,
    };
    let table = page_table(&args.block_table, &args.seq_lens, device, batch)?;
    let q_scale = q_scale(args, &query)?;
    let of_codes = f64::from(cache.scale) * f64::from(q_scale.of_all());
    Ok(AttentionProblem {
        device: device.0,
        dtype: query.dtype,
        queries: tokens(indptr, &query.leading, &table, device)?,
        heads: query.heads as i32,
        q: query.rows,
        q_scale,
        cache,
        table,
        scale: scale(args.softmax_scale, query.rows.dim(), of_codes)?,
        causal: args.causal,
        attn_sink: attn_sink(args.attn_sink.as_ref(), &q_arg, query.heads)?,
        out: Strided::NONE,
        lse: Strided::NONE,
        empty_lse: empty_lse(args.empty_lse)?,
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

/// The format is one that `decode` and `prefill` take.
fn dense(format: KvFormat) -> Result<()> {
    if KvFormat::DENSE.contains(&format) {
        return Ok(());
    }
    let names: Vec<_> = KvFormat::DENSE.iter().map(|format| format.name()).collect();
    let rule = format!("decode and prefill take {}", names.join(", "));
    Err(Error::unsupported("kv_format", format, rule))
}

/// Query and cache belong together: type, width and heads.
fn fits(cache_arg: &Arg<'_>, query: &Query, cache: &PagedCache) -> Result<()> {
    let (q, heads) = (&query.rows, query.heads);
    if query.dtype == DType::F8E4M3 && cache.format != KvFormat::Fp8 {
        let value = format!(
            "{} with a cache of the format {}",
            query.dtype, cache.format
        );
        let rule = "such queries go with a cache of the format fp8";
        return Err(Error::unsupported("q", value, rule));
    }
    if !cache.format.is_quantised() {
        cache_arg.dtype(&[query.dtype], ", as q is")?;
    }
    if q.dim() != cache.dim() {
        let rule = format!("q has rows of {}", q.dim());
        return Err(Error::invalid(
            cache_arg.name,
            format!("of rows of {}", cache.dim()),
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

/// What the queries are multiplied by: `q_scale` of float8_e4m3fn ones, else 1.
fn q_scale<I>(args: &AttentionArgs<'_, I>, query: &Query) -> Result<QueryScale> {
    let Some(given) = &args.q_scale else {
        return Ok(QueryScale::One(1.0));
    };
    if query.dtype != DType::F8E4M3 {
        let value = format!("given with {} queries", query.dtype);
        return Err(Error::invalid(
            "q_scale",
            value,
            "None: only float8_e4m3fn queries have one",
        ));
    }
    let view = match given {
        QScale::One(scale) => return positive("q_scale", *scale).map(QueryScale::One),
        QScale::Rows(view) => view,
    };
    let scale = Arg::new("q_scale", view);
    scale.exactly(&query.leading, "q without its last dimension")?;
    scale.dtype(&[DType::F32], "")?;
    let q = lead(&args.q, &Q);
    scale.device(q.view.device(), q.name)?;
    scale.memory(Last::Any, Access::Read)?;
    Ok(QueryScale::Rows(of_rows(&scale, &query.leading)))
}

/// The factor of the scores. `of_codes`: that of the codes of queries and cache, which it is multiplied with.
pub(crate) fn scale(given: Option<f64>, d_qk: i64, of_codes: f64) -> Result<f64> {
    let scale = given.unwrap_or_else(|| (d_qk as f64).powf(-0.5));
    let holds = |factor: f64| positive_f32(factor * std::f64::consts::LOG2_E).is_some();
    let rule = if !holds(scale) {
        "a positive number that float32 holds"
    } else if !holds(scale * of_codes) {
        "a positive number that float32 holds, times kv_scale and q_scale, too"
    } else {
        return Ok(scale);
    };
    Err(Error::invalid("softmax_scale", scale, rule))
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

/// What the `lse` of rows that see no key is to be.
pub(crate) fn empty_lse(given: f32) -> Result<f32> {
    if given.is_nan() {
        return Err(Error::invalid(
            "empty_lse",
            given,
            "a number, or an infinity",
        ));
    }
    Ok(given)
}

/// `out` and `lse`, into the problem, and that they lie apart from everything else.
pub(crate) fn outputs<I: QoIndptr>(
    args: &AttentionArgs<'_, I>,
    problem: &mut AttentionProblem,
) -> Result<Taken> {
    let q = lead(&args.q, &Q);
    let (out_arg, lse) = (Arg::new("out", &args.out), Arg::new("lse", &args.lse));
    problem.out = out(&args.out, &q, problem.dtype)?;
    problem.lse = row_numbers(&lse, &q)?;
    let ([q, q_rope], [kv, kv_rope]) = (each(&args.q, &Q), each(&args.kv_cache, &KV_CACHE));
    let q_scale = match &args.q_scale {
        Some(QScale::Rows(view)) => Some(view),
        Some(QScale::One(_)) | None => None,
    };
    let args = [
        Some(out_arg),
        Some(lse),
        q,
        q_rope,
        kv,
        kv_rope,
        Some(Arg::new("block_table", &args.block_table)),
        Some(Arg::new("seq_lens", &args.seq_lens)),
        named("qo_indptr", args.qo_indptr.view()),
        named("q_scale", q_scale),
        named("attn_sink", args.attn_sink.as_ref()),
    ];
    apart(2, &args)
}

/// `out` for a q of type `dtype`, of its shape but 512 wide: strides of request (0 where q has no such axis), token, head.
pub(crate) fn out(view: &View, q: &Arg<'_>, dtype: DType) -> Result<Strided<3>> {
    let leading = &q.shape()[..q.shape().len() - 1];
    let out = Arg::new("out", view);
    out.exactly(&out_shape(leading), "q but 512 wide")?;
    let why = match dtype {
        DType::F8E4M3 => ", for float8_e4m3fn queries",
        _ => ", as q is",
    };
    out.dtype(&[out_dtype(dtype)], why)?;
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
