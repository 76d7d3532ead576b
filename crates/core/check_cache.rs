//! The arguments of `append_kv`, `quantize_kv`, `dequantize_kv` and `gather_kv`, checked.

use crate::cache::{AppendArgs, GatherArgs, GatherSource};
use crate::check::{Access, Arg, Last, device_dtype};
use crate::check_paged::CacheArg;
use crate::check_parts::{CACHE, KV, KV_CACHE, OUT, each, named, page_table, rows};
use crate::dtype::{DType, Device, KvFormat};
use crate::error::{Error, Result};
use crate::overlap::apart;
use crate::problem::{
    AppendProblem, DequantizeProblem, GatherProblem, GatherTokens, NOPE_DIM, PagedCache,
    QuantizeProblem, ROPE_DIM, Strided, TwoParts,
};
use crate::quantize::{DequantizeArgs, QuantizeArgs};
use crate::view::{Parts, View};

/// What can be quantised.
const SOURCE_TYPES: [DType; 3] = [DType::Bf16, DType::Fp16, DType::F32];

pub(crate) fn append(args: &AppendArgs) -> Result<AppendProblem> {
    let kv_c = Arg::new("kv_c", &args.kv_c);
    let device = (args.kv_c.device(), "kv_c");
    let cache_arg = CacheArg {
        names: &KV_CACHE,
        parts: &args.kv_cache,
        format_name: "kv_format",
        format: args.kv_format,
        scale: args.kv_scale,
    };
    let cache = one_head(&cache_arg, device, Access::Write)?;

    let shape = kv_c.rank(&[2], "[tokens, 512]")?;
    kv_c.dim(1, NOPE_DIM, "the width of a latent row")?;
    let dtype = source_dtype(&kv_c, cache.format)?;
    kv_c.memory(Last::Rows, Access::Read)?;
    let slots = Arg::new("slots", &args.slots);
    slots.rank(&[1], "[tokens]")?;
    slots.dim(0, shape[0], "the tokens of kv_c")?;
    slots.dtype(&[DType::I64], "")?;
    slots.device(device.0, device.1)?;
    slots.memory(Last::Any, Access::Read)?;
    let rope = rope(args, &cache, shape[0])?;
    let [latent, rotary] = each(&args.kv_cache, &KV_CACHE);
    let k_pe = named("k_pe", args.k_pe.as_ref());
    apart(2, &[latent, rotary, Some(kv_c), k_pe, Some(slots)])?;
    Ok(AppendProblem {
        device: device.0,
        tokens: shape[0],
        rows: TwoParts {
            nope: kv_c.strided(),
            rope,
        },
        dtype,
        slots: slots.strided(),
        cache,
        round_scale: args.round_scale,
        stream: args.stream,
    })
}

/// The type of new rows: the cache's, or one that can be quantised.
fn source_dtype(arg: &Arg<'_>, format: KvFormat) -> Result<DType> {
    match format.dtype() {
        Some(half) => arg.dtype(&[half], ", as kv_cache is"),
        None => arg.dtype(&SOURCE_TYPES, ""),
    }
}

/// `k_pe` is there exactly when the cache has a rotary part beside the latent one.
fn rope(args: &AppendArgs, cache: &PagedCache, tokens: i64) -> Result<Option<Strided<1>>> {
    match (&args.k_pe, cache.dim() > NOPE_DIM) {
        (None, false) => Ok(None),
        (None, true) => Err(Error::invalid(
            "k_pe",
            "None",
            "a cache with rows of 576 takes the rotary parts [tokens, 64]",
        )),
        (Some(view), false) => {
            let value = format!("of shape {}", view.shape());
            Err(Error::invalid(
                "k_pe",
                value,
                "None, for a cache with rows of 512",
            ))
        }
        (Some(view), true) => {
            let k_pe = Arg::new("k_pe", view);
            k_pe.exactly(&[tokens, ROPE_DIM], "[tokens, 64] with the tokens of kv_c")?;
            let like = match cache.format.dtype() {
                Some(_) => "kv_cache",
                None => "kv_c",
            };
            k_pe.dtype(&[args.kv_c.dtype()], format_args!(", as {like} is"))?;
            k_pe.device(args.kv_c.device(), "kv_c")?;
            k_pe.memory(Last::Rows, Access::Read)?;
            Ok(Some(k_pe.strided()))
        }
    }
}

/// Numbers of a row.
pub(crate) fn width(cache: &Parts, format: Option<KvFormat>) -> Result<i64> {
    let arg = CacheArg {
        names: &CACHE,
        parts: cache,
        format_name: "kv_format",
        format,
        scale: None,
    };
    let lead = arg.lead();
    Ok(arg
        .check((lead.view.device(), lead.name), Access::Read)?
        .dim())
}

/// A cache of one KV head, in a type that the device has kernels for.
fn one_head(arg: &CacheArg<'_>, device: (Device, &str), access: Access) -> Result<PagedCache> {
    let cache = arg.check(device, access)?;
    let lead = arg.lead();
    if cache.kv_heads != 1 {
        let value = format!("of shape {}", lead.view.shape());
        let rule = "this operation takes caches of one KV head";
        return Err(Error::unsupported(lead.name, value, rule));
    }
    device_dtype(lead.name, device.0, lead.view.dtype())?;
    Ok(cache)
}

/// The format is a quantised one.
fn quantised(format: KvFormat) -> Result<()> {
    if format.is_quantised() {
        return Ok(());
    }
    let rule = "a quantised format: rows of a 16-bit cache are as they are";
    Err(Error::invalid("kv_format", format, rule))
}

pub(crate) fn quantize(args: &QuantizeArgs) -> Result<QuantizeProblem> {
    quantised(args.kv_format)?;
    let kv = Arg::new("kv", &args.kv);
    let device = (args.kv.device(), "kv");
    let parts = Parts::One(args.kv);
    let rows = rows::<2>(
        &parts,
        &KV,
        &[3, 4],
        "num_pages, page_size, (1)",
        Access::Read,
    )?;
    let dtype = kv.dtype(&SOURCE_TYPES, "")?;
    let shape = kv.shape();
    if shape.len() == 4 {
        kv.dim(2, 1, "the KV heads of a quantised cache")?;
    }
    let out = Parts::One(args.out);
    let cache = one_head(
        &CacheArg {
            names: &OUT,
            parts: &out,
            format_name: "kv_format",
            format: Some(args.kv_format),
            scale: args.kv_scale,
        },
        device,
        Access::Write,
    )?;
    let out = Arg::new("out", &args.out);
    out.dim(0, shape[0], "the pages of kv")?;
    out.dim(1, shape[1], "the page size of kv")?;
    let rule = format_args!("d_qk of the format {} of out", args.kv_format);
    kv.dim(shape.len() - 1, cache.dim(), rule)?;
    apart(1, &[Some(out), Some(kv)])?;
    Ok(QuantizeProblem {
        device: device.0,
        rows,
        dtype,
        cache,
        round_scale: args.round_scale,
        stream: args.stream,
    })
}

pub(crate) fn dequantize(args: &DequantizeArgs) -> Result<DequantizeProblem> {
    let parts = Parts::One(args.cache);
    let device = (args.cache.device(), "cache");
    let arg = CacheArg {
        names: &CACHE,
        parts: &parts,
        format_name: "kv_format",
        format: args.kv_format,
        scale: args.kv_scale,
    };
    let cache = one_head(&arg, device, Access::Read)?;
    quantised(cache.format)?;
    let (pages, page_size) = (i64::from(cache.num_pages), i64::from(cache.page_size));
    let out = Arg::new("out", &args.out);
    let what = "[num_pages, page_size, d_qk] of the cache";
    out.exactly(&[pages, page_size, cache.dim()], what)?;
    let dtype = out.dtype(&[DType::Bf16, DType::F32], "")?;
    out.device(device.0, device.1)?;
    out.memory(Last::Rows, Access::Write)?;
    apart(1, &[Some(out), Some(arg.lead())])?;
    Ok(DequantizeProblem {
        device: device.0,
        cache,
        out: out.strided(),
        dtype,
        stream: args.stream,
    })
}

pub(crate) fn gather(args: &GatherArgs) -> Result<GatherProblem> {
    let cache_arg = CacheArg {
        names: &CACHE,
        parts: &args.cache,
        format_name: "kv_format",
        format: args.kv_format,
        scale: args.kv_scale,
    };
    let lead = cache_arg.lead();
    let device = (lead.view.device(), lead.name);
    let cache = one_head(&cache_arg, device, Access::Read)?;

    let out = Arg::new("out", &args.out);
    let shape = out.rank(&[2], "[tokens, d_qk]")?;
    out.dim(1, cache.dim(), "the width of a cached row")?;
    out.dtype(&[DType::Bf16], "")?;
    out.device(device.0, device.1)?;
    out.memory(Last::Rows, Access::Write)?;
    // What else is given: `offsets_out`, which is written, and two more.
    let (source, [offsets, first, second]) = match &args.source {
        GatherSource::Pages {
            block_table,
            seq_lens,
            offsets_out,
        } => {
            let table = page_table(block_table, seq_lens, device, None)?;
            let offsets = Arg::new("offsets_out", offsets_out);
            offsets.rank(&[1], "[batch + 1]")?;
            offsets.dim(
                0,
                i64::from(table.batch) + 1,
                "the batch of block_table + 1",
            )?;
            offsets.dtype(&[DType::I64], "")?;
            offsets.device(device.0, device.1)?;
            offsets.memory(Last::Unit, Access::Write)?;
            let tokens = GatherTokens::Pages {
                table,
                offsets: offsets_out.ptr(),
            };
            let table = Arg::new("block_table", block_table);
            let lens = Arg::new("seq_lens", seq_lens);
            (tokens, [offsets, table, lens].map(Some))
        }
        GatherSource::Ids(ids) => {
            let tokens = self::ids(ids, device, shape[0])?;
            (tokens, [None, Some(Arg::new("ids", ids)), None])
        }
    };
    let [latent, rotary] = each(&args.cache, &CACHE);
    apart(2, &[Some(out), offsets, latent, rotary, first, second])?;
    Ok(GatherProblem {
        device: device.0,
        tokens: shape[0],
        cache,
        source,
        out: out.strided(),
        stream: args.stream,
    })
}

fn ids(view: &View, device: (crate::Device, &str), tokens: i64) -> Result<GatherTokens> {
    let ids = Arg::new("ids", view);
    ids.rank(&[1], "[tokens]")?;
    ids.dim(0, tokens, "the rows of out")?;
    let dtype = ids.dtype(&[DType::I32, DType::I64], "")?;
    ids.device(device.0, device.1)?;
    ids.memory(Last::Any, Access::Read)?;
    Ok(GatherTokens::Ids {
        ids: ids.strided(),
        wide: dtype == DType::I64,
    })
}
