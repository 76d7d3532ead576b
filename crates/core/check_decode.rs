//! The arguments of `decode`, checked: views to a [`DecodeProblem`].

use crate::check::{Access, Arg, Last, device_dtype, supported_format};
use crate::check_parts::{KV_CACHE, Q, cache, lead, page_table, rows};
use crate::decode::DecodeArgs;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{DecodeProblem, NOPE_DIM, PagedCache, Strided, TwoParts};
use crate::view::Parts;

const HALF_TYPES: [DType; 2] = [DType::Bf16, DType::Fp16];

/// `q` by itself: `[batch, q_len, heads]` and the type.
pub(crate) fn query(q: &Parts) -> Result<(TwoParts<3>, [i64; 3], DType)> {
    let lead = lead(q, &Q);
    if lead.view.dtype() == DType::F8E4M3 {
        let rule = "queries are bfloat16 or float16 in this version";
        return Err(Error::unsupported(lead.name, DType::F8E4M3, rule));
    }
    let dtype = lead.dtype(&HALF_TYPES, "")?;
    let rows = rows::<3>(q, &Q, &[4], "batch, q_len, heads", Access::Read)?;
    let shape = lead.shape();
    if shape[2] < 1 {
        let value = format!("of shape {}", lead.view.shape());
        return Err(Error::invalid(
            lead.name,
            value,
            "dimension 2, the query heads, is at least 1",
        ));
    }
    Ok((rows, [shape[0], shape[1], shape[2]], dtype))
}

/// Everything but `out`, `lse`, `plan` and `workspace`, which the problem does not have yet.
pub(crate) fn inputs(args: &DecodeArgs<'_>) -> Result<DecodeProblem> {
    if let Some(format) = args.kv_format {
        supported_format(format)?;
    }
    let (q, [batch, q_len, heads], dtype) = query(&args.q)?;
    let q_arg = lead(&args.q, &Q);
    let device = (q_arg.view.device(), q_arg.name);
    device_dtype(q_arg.name, device.0, dtype)?;
    let cache = cache(
        &args.kv_cache,
        &KV_CACHE,
        args.kv_format,
        device,
        Access::Read,
    )?;
    fits(args, &q, &cache, dtype, heads)?;
    let table = page_table(
        &args.block_table,
        &args.seq_lens,
        device,
        Some((batch, "the batch of q")),
    )?;
    Ok(DecodeProblem {
        device: device.0,
        dtype,
        q_len: q_len as i32,
        heads: heads as i32,
        q,
        cache,
        table,
        scale: scale(args.softmax_scale, q.dim())?,
        causal: args.causal,
        attn_sink: attn_sink(args, heads)?,
        out: Strided::NONE,
        lse: Strided::NONE,
        stream: args.stream,
    })
}

/// Query and cache belong together: type, width and heads.
fn fits(
    args: &DecodeArgs<'_>,
    q: &TwoParts<3>,
    cache: &PagedCache,
    dtype: DType,
    heads: i64,
) -> Result<()> {
    let cache_arg = lead(&args.kv_cache, &KV_CACHE);
    cache_arg.dtype(&[dtype], ", as q is")?;
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

fn scale(given: Option<f64>, d_qk: i64) -> Result<f64> {
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

fn attn_sink(args: &DecodeArgs<'_>, heads: i64) -> Result<u64> {
    let Some(view) = &args.attn_sink else {
        return Ok(0);
    };
    let sink = Arg::new("attn_sink", view);
    sink.rank(&[1], "[heads]")?;
    sink.dim(0, heads, "the heads of q")?;
    sink.dtype(&[DType::F32], "")?;
    let q = lead(&args.q, &Q);
    sink.device(q.view.device(), q.name)?;
    sink.memory(Last::Unit, Access::Read)?;
    Ok(view.ptr())
}

/// `out` and `lse`, into the problem.
pub(crate) fn outputs(args: &DecodeArgs<'_>, problem: &mut DecodeProblem) -> Result<()> {
    let q = lead(&args.q, &Q);
    let leading = &q.shape()[..3];
    let out = Arg::new("out", &args.out);
    out.exactly(
        &[leading[0], leading[1], leading[2], NOPE_DIM],
        "q but 512 wide",
    )?;
    out.dtype(&[problem.dtype], ", as q is")?;
    out.device(problem.device, q.name)?;
    out.memory(Last::Rows, Access::Write)?;
    let lse = Arg::new("lse", &args.lse);
    lse.exactly(leading, "q without its last dimension")?;
    lse.dtype(&[DType::F32], "")?;
    lse.device(problem.device, q.name)?;
    lse.memory(Last::Any, Access::Write)?;
    (problem.out, problem.lse) = (out.strided(), lse.strided());
    Ok(())
}
