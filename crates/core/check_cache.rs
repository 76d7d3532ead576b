//! The arguments of `append_kv` and `gather_kv`, checked.

use crate::cache::{AppendArgs, GatherArgs, GatherSource};
use crate::check::{Access, Arg, Last, device_dtype};
use crate::check_parts::{CACHE, KV_CACHE, PartNames, cache, lead, page_table};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{
    AppendProblem, GatherProblem, GatherTokens, NOPE_DIM, PagedCache, ROPE_DIM, Strided, TwoParts,
};
use crate::view::{Parts, View};

pub(crate) fn append(args: &AppendArgs) -> Result<AppendProblem> {
    let kv_c = Arg::new("kv_c", &args.kv_c);
    let device = (args.kv_c.device(), "kv_c");
    let cache = cache(
        &args.kv_cache,
        &KV_CACHE,
        args.kv_format,
        device,
        Access::Write,
    )?;
    one_head(&cache, &args.kv_cache, &KV_CACHE)?;
    device_dtype(lead(&args.kv_cache, &KV_CACHE).name, device.0, cache.dtype)?;

    let shape = kv_c.rank(&[2], "[tokens, 512]")?;
    kv_c.dim(1, NOPE_DIM, "the width of a latent row")?;
    kv_c.dtype(&[cache.dtype], ", as kv_cache is")?;
    kv_c.memory(Last::Rows, Access::Read)?;
    let slots = Arg::new("slots", &args.slots);
    slots.rank(&[1], "[tokens]")?;
    slots.dim(0, shape[0], "the tokens of kv_c")?;
    slots.dtype(&[DType::I64], "")?;
    slots.device(device.0, device.1)?;
    slots.memory(Last::Any, Access::Read)?;
    Ok(AppendProblem {
        device: device.0,
        tokens: shape[0],
        rows: TwoParts {
            nope: kv_c.strided(),
            rope: rope(args, &cache, shape[0], cache.dtype)?,
        },
        slots: slots.strided(),
        cache,
        stream: args.stream,
    })
}

/// `k_pe` is there exactly when the cache has a rotary part.
fn rope(
    args: &AppendArgs,
    cache: &PagedCache,
    tokens: i64,
    dtype: DType,
) -> Result<Option<Strided<1>>> {
    match (&args.k_pe, cache.rows.rope) {
        (None, None) => Ok(None),
        (None, Some(_)) => Err(Error::invalid(
            "k_pe",
            "None",
            "a cache with rows of 576 takes the rotary parts [tokens, 64]",
        )),
        (Some(view), None) => {
            let value = format!("of shape {}", view.shape());
            Err(Error::invalid(
                "k_pe",
                value,
                "None, for a cache with rows of 512",
            ))
        }
        (Some(view), Some(_)) => {
            let k_pe = Arg::new("k_pe", view);
            k_pe.exactly(&[tokens, ROPE_DIM], "[tokens, 64] with the tokens of kv_c")?;
            k_pe.dtype(&[dtype], ", as kv_cache is")?;
            k_pe.device(args.kv_c.device(), "kv_c")?;
            k_pe.memory(Last::Rows, Access::Read)?;
            Ok(Some(k_pe.strided()))
        }
    }
}

fn one_head(cache: &PagedCache, parts: &Parts, names: &PartNames) -> Result<()> {
    if cache.kv_heads == 1 {
        return Ok(());
    }
    let arg = lead(parts, names);
    let value = format!("of shape {}", arg.view.shape());
    Err(Error::unsupported(
        arg.name,
        value,
        "this operation takes caches of one KV head",
    ))
}

pub(crate) fn gather(args: &GatherArgs) -> Result<GatherProblem> {
    let cache_arg = lead(&args.cache, &CACHE);
    let device = (cache_arg.view.device(), cache_arg.name);
    let cache = cache(&args.cache, &CACHE, args.kv_format, device, Access::Read)?;
    one_head(&cache, &args.cache, &CACHE)?;
    device_dtype(cache_arg.name, device.0, cache.dtype)?;

    let out = Arg::new("out", &args.out);
    let shape = out.rank(&[2], "[tokens, d_qk]")?;
    out.dim(1, cache.rows.dim(), "the width of a cached row")?;
    out.dtype(&[DType::Bf16], "")?;
    out.device(device.0, device.1)?;
    out.memory(Last::Rows, Access::Write)?;
    let source = match &args.source {
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
            GatherTokens::Pages {
                table,
                offsets: offsets_out.ptr(),
            }
        }
        GatherSource::Ids(ids) => self::ids(ids, device, shape[0])?,
    };
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
