//! `append_kv`, `gather_kv` and `cache_shape`.

use ferromla::{AppendArgs, DType, GatherArgs, GatherSource, KvFormat};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arguments::{self, Number, Pair};
use crate::errors;
use crate::framework;
use crate::tensor;

/// Writes new tokens into their slots of a paged cache, quantised as its format says.
///
/// Args:
///     kv_c: `[t, 512]` latent parts of the new tokens, in the cache's dtype; for a quantised cache bfloat16,
///         float16 or float32.
///     k_pe: `[t, 64]` rotary parts, in the dtype of `kv_c`; None for a cache of `d_qk` 512.
///     kv_cache: `[n, P, d_qk]` or `[n, P, 1, d_qk]`, or the pair of its parts; quantised `[n, P, bytes]` or
///         `[n, P, 1, bytes]` uint8, int8 or float8_e4m3fn. Written in place.
///     slots: `[t]` int64, `page * P + offset` each. Negative slots, and slots past the cache, are skipped.
///     kv_format: of the cache; None for what its dtype says: `"bf16"`, `"fp16"`, or `"fp8"` for float8_e4m3fn.
///     kv_scale: what the numbers of an `"fp8"` cache are multiplied by; 1 when None. Only for that format.
///     round_scale: round the scales of `"fp8_v32"` up to powers of two. Those of the other formats always are,
///         or never.
///
/// Raises:
///     InvalidArgument, Unsupported: before anything is written; the message names argument, value, rule.
///
/// Example:
///     >>> import numpy as np, ferromla
///     >>> cache = np.zeros((4, 64, 576), np.float16)
///     >>> latent, rope = np.ones((2, 512), np.float16), np.ones((2, 64), np.float16)
///     >>> ferromla.append_kv(latent, rope, cache, np.array([3 * 64 + 5, -1]))
///     >>> np.argwhere(cache[:, :, 0] == 1).tolist()
///     [[3, 5]]
#[pyfunction]
#[pyo3(signature = (kv_c, k_pe, kv_cache, slots, *, kv_format=None, kv_scale=None, round_scale=true))]
#[allow(clippy::too_many_arguments)] // the public signature
pub fn append_kv<'py>(
    py: Python<'py>,
    kv_c: &Bound<'py, PyAny>,
    k_pe: Option<&Bound<'py, PyAny>>,
    kv_cache: &Bound<'py, PyAny>,
    slots: &Bound<'py, PyAny>,
    kv_format: Option<&str>,
    kv_scale: Option<Number>,
    round_scale: bool,
) -> PyResult<()> {
    let kv_c = tensor::read(kv_c, "kv_c")?;
    let k_pe = k_pe.map(|part| tensor::read(part, "k_pe")).transpose()?;
    let kv_cache = Pair::read(kv_cache, "kv_cache", true)?;
    let slots = tensor::read(slots, "slots")?;
    let args = AppendArgs {
        kv_c: kv_c.view,
        k_pe: k_pe.as_ref().map(|part| part.view),
        kv_cache: kv_cache.parts(),
        slots: slots.view,
        kv_format: arguments::kv_format("kv_format", kv_format)?,
        kv_scale: kv_scale.map(Number::get),
        round_scale,
        stream: framework::current_stream(&kv_cache.first)?,
    };
    // SAFETY: every view borrows a tensor that lives to the end of this function; on CUDA the framework's
    // allocator orders reuse after the work queued on its stream.
    arguments::run(py, kv_cache.device(), || unsafe {
        ferromla::append_kv(&args)
    })
}

/// Copies cached tokens to one contiguous bfloat16 array, dequantised; absent tokens give zeros.
///
/// Either the tokens of each request, one request after another, by `block_table` and `seq_lens`; or the
/// tokens of explicit physical `ids`.
///
/// Args:
///     cache: `[n, P, d_qk]` or `[n, P, 1, d_qk]`, or the pair of its parts; quantised `[n, P, bytes]` or
///         `[n, P, 1, bytes]` uint8, int8 or float8_e4m3fn.
///     block_table: `[b, max_pages]` int32.
///     seq_lens: `[b]` int32.
///     ids: `[t]` int32 or int64, `page * P + offset` each; one outside the cache gives a row of zeros.
///     kv_format: of the cache; None for what its dtype says: `"bf16"`, `"fp16"`, or `"fp8"` for float8_e4m3fn.
///     kv_scale: what the numbers of an `"fp8"` cache are multiplied by; 1 when None. Only for that format.
///     num_tokens: rows of `out` where it is not given; for CPU tensors the sum of the lengths when None.
///         On CUDA it or `out` must be given, since reading the lengths would wait for the device.
///     out: `[t, d_qk]` bfloat16. Rows past the last token are zeroed, tokens past the last row dropped.
///     offsets: `[b + 1]` int64 to write to: request `r` is rows `offsets[r]` to `offsets[r + 1]`.
///
/// Returns:
///     `(out, offsets)` by pages, `out` alone by ids.
///
/// Raises:
///     InvalidArgument, Unsupported: before anything is written; the message names argument, value, rule.
///
/// Example:
///     >>> import numpy as np, ferromla
///     >>> cache = np.ones((4, 64, 576), np.float16)
///     >>> table, lens = np.array([[3, 1], [2, 0]], np.int32), np.array([70, 5], np.int32)
///     >>> rows, offsets = ferromla.gather_kv(cache, table, lens)
///     >>> rows.shape, rows.dtype.name, offsets.tolist()
///     ((75, 576), 'bfloat16', [0, 70, 75])
///     >>> ferromla.gather_kv(cache, ids=np.array([0, -1]))[:, :2].tolist()
///     [[1.0, 1.0], [0.0, 0.0]]
#[pyfunction]
#[pyo3(signature = (cache, block_table=None, seq_lens=None, *, ids=None, kv_format=None, kv_scale=None,
    num_tokens=None, out=None, offsets=None))]
#[allow(clippy::too_many_arguments)] // the public signature
pub fn gather_kv<'py>(
    py: Python<'py>,
    cache: &Bound<'py, PyAny>,
    block_table: Option<&Bound<'py, PyAny>>,
    seq_lens: Option<&Bound<'py, PyAny>>,
    ids: Option<&Bound<'py, PyAny>>,
    kv_format: Option<&str>,
    kv_scale: Option<Number>,
    num_tokens: Option<i64>,
    out: Option<&Bound<'py, PyAny>>,
    offsets: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let cache = Pair::read(cache, "cache", false)?;
    let kv_format = arguments::kv_format("kv_format", kv_format)?;
    let rows = |count: i64| {
        let width = ferromla::cache_d_qk(&cache.parts(), kv_format).map_err(errors::to_python)?;
        framework::empty(&cache.first, "out", &[count, width], DType::Bf16)
    };
    let num_tokens = arguments::num_tokens(num_tokens)?;
    let mut args = GatherArgs {
        cache: cache.parts(),
        source: GatherSource::Ids(cache.first.view),
        out: cache.first.view,
        kv_format,
        kv_scale: kv_scale.map(Number::get),
        stream: framework::current_stream(&cache.first)?,
    };
    let gather = |args: &GatherArgs| {
        // SAFETY: as in `append_kv`.
        arguments::run(py, cache.device(), || unsafe { ferromla::gather_kv(args) })
    };
    match (block_table, seq_lens, ids) {
        (None, None, Some(ids)) => {
            arguments::absent(offsets, "offsets", "must be None when gathering by ids")?;
            let ids = tensor::read(ids, "ids")?;
            let count = num_tokens
                .or(ids.view.shape().first().copied())
                .unwrap_or(0);
            let out = arguments::output(out, "out", || rows(count))?;
            (args.source, args.out) = (GatherSource::Ids(ids.view), out.view);
            gather(&args)?;
            Ok(out.object)
        }
        (Some(table), Some(lens), None) => {
            let table = tensor::read(table, "block_table")?;
            let lens = tensor::read(lens, "seq_lens")?;
            let batch = lens.view.shape().first().copied().unwrap_or(0);
            let offsets = arguments::output(offsets, "offsets", || {
                framework::empty(&cache.first, "offsets", &[batch + 1], DType::I64)
            })?;
            args.source = GatherSource::Pages {
                block_table: table.view,
                seq_lens: lens.view,
                offsets_out: offsets.view,
            };
            let out = arguments::output(out, "out", || match num_tokens {
                Some(count) => rows(count),
                None => {
                    let none = rows(0)?;
                    args.out = none.view;
                    rows(arguments::counted(&lens, &offsets, || gather(&args))?)
                }
            })?;
            args.out = out.view;
            gather(&args)?;
            Ok(PyTuple::new(py, [out.object, offsets.object])?.into_any())
        }
        _ => Err(errors::invalid(
            "ids",
            if ids.is_some() { "given" } else { "None" },
            "give either block_table and seq_lens, or ids",
        )),
    }
}

/// `(shape, strides, name of the dtype, name of the device)` of an empty cache; `d_qk` is the first that the
/// format can have when None.
#[pyfunction]
pub fn cache_shape(
    num_pages: i64,
    page_size: i64,
    kv_format: &str,
    d_qk: Option<i64>,
    device: &Bound<'_, PyAny>,
) -> PyResult<(Vec<i64>, Vec<i64>, &'static str, String)> {
    let device = arguments::device(device)?;
    let format = KvFormat::parse(kv_format).map_err(errors::to_python)?;
    let d_qk = d_qk.unwrap_or(format.d_qk()[0]);
    let found =
        ferromla::cache_shape(num_pages, page_size, format, d_qk).map_err(errors::to_python)?;
    let (shape, strides) = (found.shape.to_vec(), found.strides.to_vec());
    Ok((shape, strides, found.dtype.name(), device.to_string()))
}
