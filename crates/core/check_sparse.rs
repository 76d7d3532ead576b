//! The arguments of `sparse_decode` and `sparse_prefill`, checked: views to a [`SparseProblem`].

use crate::check::{Access, Arg, Last, device_dtype};
use crate::check_attention::{Query, attn_sink, empty_lse, out, query, row_numbers, scale};
use crate::check_paged::{CacheArg, Rows, in_reach, in_reach_beside_codes};
use crate::check_parts::{KV_CACHE, ListTokens, PartNames, Q, each, lead, list_lens, named};
use crate::dtype::{DType, Device, KvFormat};
use crate::error::{Error, Result};
use crate::overlap::{Taken, apart};
use crate::problem::{KeyLists, PagedCache, SparseProblem, Strided};
use crate::sparse::SparseDecodeArgs;
use crate::sparse_prefill::SparsePrefillArgs;
use crate::view::{Parts, View};

const EXTRA: PartNames = ["extra_kv_cache", "extra_kv_cache[0]", "extra_kv_cache[1]"];
const KV: PartNames = ["kv", "kv[0]", "kv[1]"];

pub(crate) fn decode(args: &SparseDecodeArgs<'_>) -> Result<(SparseProblem, Taken)> {
    let query = half_query(&args.q, false)?;
    let q = lead(&args.q, &Q);
    let main = GivenLists {
        names: &KV_CACHE,
        cache: args.kv_cache,
        format_name: "kv_format",
        format: args.kv_format,
        scale: args.kv_scale,
        formats: &KvFormat::SPARSE,
        indices: Arg::new("indices", &args.indices),
        lens: named("topk_lengths", args.topk_lengths.as_ref()),
    };
    let extra = args.extra.as_ref().map(|extra| GivenLists {
        names: &EXTRA,
        cache: extra.kv_cache,
        format_name: "extra_kv_format",
        format: extra.kv_format.or(args.kv_format),
        scale: None,
        formats: &KvFormat::ALL,
        indices: Arg::new("extra_indices", &extra.indices),
        lens: named("extra_topk_lengths", extra.topk_lengths.as_ref()),
    });
    device_dtype(q.name, q.view.device(), query.dtype)?;
    let tokens = ListTokens::OfRequests {
        batch: query.leading[0],
        q_len: query.leading[1],
    };
    let main = main.check(&query, &q, tokens)?;
    let mut extra = extra
        .map(|extra| extra.check(&query, &q, tokens))
        .transpose()?;
    if let Some(extra) = &mut extra {
        share_scale(&main.cache, &mut extra.cache)?;
    }
    beside_codes(args, &main, extra.as_ref())?;
    let lse = Arg::new("lse", &args.lse);
    let problem = SparseProblem {
        device: q.view.device(),
        dtype: query.dtype,
        batch: query.leading[0] as i32,
        q_len: query.leading[1] as i32,
        heads: query.heads as i32,
        q: query.rows,
        main,
        extra,
        scale: scale(
            args.softmax_scale,
            query.rows.dim(),
            main.cache.scale.into(),
        )?,
        attn_sink: attn_sink(args.attn_sink.as_ref(), &q, query.heads)?,
        out: out(&args.out, &q, query.dtype)?,
        lse: row_numbers(&lse, &q)?,
        empty_lse: empty_lse(args.empty_lse)?,
        max_logits: None,
        stream: args.stream,
    };
    let ([q, q_rope], [kv, kv_rope]) = (each(&args.q, &Q), each(&args.kv_cache, &KV_CACHE));
    let extra = args.extra.as_ref();
    let [extra_kv, extra_rope] = extra.map_or([None; 2], |extra| each(&extra.kv_cache, &EXTRA));
    let given = [
        Some(Arg::new("out", &args.out)),
        Some(lse),
        q,
        q_rope,
        kv,
        kv_rope,
        Some(Arg::new("indices", &args.indices)),
        named("topk_lengths", args.topk_lengths.as_ref()),
        extra_kv,
        extra_rope,
        named("extra_indices", extra.map(|extra| &extra.indices)),
        named(
            "extra_topk_lengths",
            extra.and_then(|extra| extra.topk_lengths.as_ref()),
        ),
        named("attn_sink", args.attn_sink.as_ref()),
    ];
    Ok((problem, apart(2, &given)?))
}

pub(crate) fn prefill(args: &SparsePrefillArgs<'_>) -> Result<(SparseProblem, Taken)> {
    let query = half_query(&args.q, true)?;
    let q = lead(&args.q, &Q);
    let main = GivenLists {
        names: &KV,
        cache: pages_of_one(&args.kv),
        format_name: "kv_format",
        format: args.kv_format,
        scale: args.kv_scale,
        formats: &KvFormat::SPARSE,
        indices: Arg::new("indices", &args.indices),
        lens: named("topk_lengths", args.topk_lengths.as_ref()),
    };
    device_dtype(q.name, q.view.device(), query.dtype)?;
    let tokens = ListTokens::All {
        num_tokens: query.leading[0],
    };
    let main = main.check(&query, &q, tokens)?;
    let max_logits = Arg::new("max_logits", &args.max_logits);
    let lse = Arg::new("lse", &args.lse);
    let problem = SparseProblem {
        device: q.view.device(),
        dtype: query.dtype,
        batch: 1,
        q_len: query.leading[0] as i32,
        heads: query.heads as i32,
        q: query.rows,
        main,
        extra: None,
        scale: scale(
            args.softmax_scale,
            query.rows.dim(),
            main.cache.scale.into(),
        )?,
        attn_sink: attn_sink(args.attn_sink.as_ref(), &q, query.heads)?,
        out: out(&args.out, &q, query.dtype)?,
        lse: row_numbers(&lse, &q)?,
        empty_lse: empty_lse(args.empty_lse)?,
        max_logits: Some(row_numbers(&max_logits, &q)?),
        stream: args.stream,
    };
    let ([q, q_rope], [kv, kv_rope]) = (each(&args.q, &Q), each(&args.kv, &KV));
    let given = [
        Some(Arg::new("out", &args.out)),
        Some(max_logits),
        Some(lse),
        q,
        q_rope,
        kv,
        kv_rope,
        Some(Arg::new("indices", &args.indices)),
        named("topk_lengths", args.topk_lengths.as_ref()),
        named("attn_sink", args.attn_sink.as_ref()),
    ];
    Ok((problem, apart(3, &given)?))
}

/// An extra cache has the scale of the main one: results are multiplied with one number.
fn share_scale(main: &PagedCache, extra: &mut PagedCache) -> Result<()> {
    if extra.format == KvFormat::Fp8 && main.format == KvFormat::Fp8 {
        extra.scale = main.scale;
    }
    if extra.scale == main.scale {
        return Ok(());
    }
    let value = format!(
        "{} beside an extra cache of the format {}",
        main.scale, extra.format
    );
    let rule = "other than 1 it is of both caches, of the format fp8";
    Err(Error::unsupported("kv_scale", value, rule))
}

/// A cache of 16-bit numbers beside a quantised one is read as that is.
fn beside_codes(
    args: &SparseDecodeArgs<'_>,
    main: &KeyLists,
    extra: Option<&KeyLists>,
) -> Result<()> {
    let (Some(given), Some(extra)) = (&args.extra, extra) else {
        return Ok(());
    };
    let formats = [main.cache.format, extra.cache.format];
    if formats[0].is_quantised() == formats[1].is_quantised() {
        return Ok(());
    }
    let caches = [
        (&args.kv_cache, &KV_CACHE, &main.cache),
        (&given.kv_cache, &EXTRA, &extra.cache),
    ];
    for (parts, names, cache) in caches {
        if cache.format.is_quantised() {
            in_reach(&lead(parts, names), cache, Rows::ByUnits)?;
        } else {
            let mut parts = each(parts, names).into_iter().flatten();
            parts.try_for_each(|part| in_reach_beside_codes(&part, cache))?;
        }
    }
    Ok(())
}

fn half_query(q: &Parts, ragged: bool) -> Result<Query> {
    let query = query(q, ragged)?;
    if query.dtype == DType::F8E4M3 {
        let rule = "queries over listed keys are bfloat16 or float16";
        return Err(Error::unsupported(lead(q, &Q).name, query.dtype, rule));
    }
    Ok(query)
}

/// Tokens without pages as pages of one token; anything else as it is.
fn pages_of_one(kv: &Parts) -> Parts {
    let paged = |view: &View| match view.shape().rank() {
        2 => view.with_middle_axis(),
        _ => *view,
    };
    match kv {
        Parts::One(view) => Parts::One(paged(view)),
        Parts::Two(nope, rope) => Parts::Two(paged(nope), paged(rope)),
    }
}

/// Lists of keys in one cache, as a call was given them.
struct GivenLists<'a> {
    names: &'static PartNames,
    cache: Parts,
    format_name: &'static str,
    format: Option<KvFormat>,
    scale: Option<f64>,
    /// Those it may have.
    formats: &'a [KvFormat],
    indices: Arg<'a>,
    lens: Option<Arg<'a>>,
}

impl GivenLists<'_> {
    fn check(&self, query: &Query, q: &Arg<'_>, tokens: ListTokens) -> Result<KeyLists> {
        let device = (q.view.device(), q.name);
        let given = CacheArg {
            names: self.names,
            parts: &self.cache,
            format_name: self.format_name,
            format: self.format,
            scale: self.scale,
        };
        let cache = given.check(device, Access::Read)?;
        // Of rows of 512 columns some kernels convert codes before they multiply.
        let rows = if query.rows.rope.is_none() {
            Rows::ByUnits
        } else {
            Rows::Anywhere
        };
        in_reach(&given.lead(), &cache, rows)?;
        self.fits(query, &cache)?;
        let (indices, topk) = indices(&self.indices, device, tokens)?;
        let lens = match &self.lens {
            Some(lens) => Some(list_lens(lens, device, tokens)?),
            None => None,
        };
        Ok(KeyLists {
            cache,
            indices,
            topk: topk as i32,
            lens,
        })
    }

    /// Query and cache belong together: type, width and heads.
    fn fits(&self, query: &Query, cache: &PagedCache) -> Result<()> {
        let arg = lead(&self.cache, self.names);
        if !self.formats.contains(&cache.format) {
            let rule = "only an extra cache has this format";
            return Err(Error::unsupported(self.format_name, cache.format, rule));
        }
        if !cache.format.is_quantised() {
            arg.dtype(&[query.dtype], ", as q is")?;
        } else if query.dtype != DType::Bf16 {
            let value = format!(
                "{} with a cache of the format {}",
                query.dtype, cache.format
            );
            let rule = "queries over listed keys of a quantised cache are bfloat16";
            return Err(Error::unsupported("q", value, rule));
        }
        if query.rows.dim() != cache.dim() {
            let rule = format!("q has rows of {}", query.rows.dim());
            let value = format!("of rows of {}", cache.dim());
            return Err(Error::invalid(arg.name, value, rule));
        }
        if cache.kv_heads != 1 {
            let value = format!("of shape {}", arg.view.shape());
            let rule = "indices choose from caches of one KV head";
            return Err(Error::unsupported(arg.name, value, rule));
        }
        Ok(())
    }
}

/// `[b, s_q, topk]`; `[t, topk]` or `[t, 1, topk]` for tokens without requests. Returned as strides of request (0
/// without) and token, and `topk`.
fn indices(arg: &Arg<'_>, device: (Device, &str), tokens: ListTokens) -> Result<(Strided<2>, i64)> {
    let strided = match tokens {
        ListTokens::OfRequests { batch, q_len } => {
            arg.rank(&[3], "[batch, q_len, topk]")?;
            arg.dim(0, batch, "the batch of q")?;
            arg.dim(1, q_len, "the query tokens of q")?;
            arg.strided::<2>()
        }
        ListTokens::All { num_tokens } => {
            let shape = arg.rank(&[2, 3], "[tokens, topk] or [tokens, 1, topk]")?;
            arg.dim(0, num_tokens, "the tokens of q")?;
            if shape.len() == 3 {
                arg.dim(1, 1, "the KV heads")?;
            }
            let Strided { ptr, strides } = arg.strided::<1>();
            let strides = [0, strides[0]];
            Strided { ptr, strides }
        }
    };
    arg.dtype(&[DType::I32], "")?;
    arg.device(device.0, device.1)?;
    arg.memory(Last::Unit, Access::Read)?;
    Ok((strided, arg.shape()[arg.shape().len() - 1]))
}
