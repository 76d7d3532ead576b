//! `quantize_kv` and `dequantize_kv`.

use ferromla::{DType, DequantizeArgs, KvFormat, Parts, QuantizeArgs};
use pyo3::prelude::*;

use crate::arguments::{self, Number};
use crate::errors;
use crate::framework;
use crate::tensor::{self, Tensor};

/// Quantises a whole cache.
///
/// With `amax` the largest magnitude of the numbers that share a scale, the scale is `amax / 448` (`"fp4_v41"`:
/// `amax / 6`, itself rounded to e4m3), and a code the nearest to `number / scale`, ties to even. What is too large
/// becomes the largest code. Rotary parts that are bfloat16 stay what they are, bit for bit.
///
/// Args:
///     kv: `[n, P, d_qk]` or `[n, P, 1, d_qk]`, bfloat16, float16 or float32.
///     kv_format: `"fp8"`, `"fp8_v32"` (`d_qk` 576), `"fp8_v4"`, `"fp8_v41"`, `"fp8_v41_split"` or `"fp4_v41"`
///         (`d_qk` 512).
///     kv_scale: what the numbers of an `"fp8"` cache are multiplied by; 1 when None. Only for that format.
///     round_scale: round the scales of `"fp8_v32"` up to powers of two. Those of the other formats always are,
///         or never.
///     out: `[n, P, bytes]` or `[n, P, 1, bytes]`, uint8, int8 or float8_e4m3fn, to write to.
///
/// Returns:
///     `out`, or a new cache with the shape, strides and dtype of `empty_kv_cache`.
///
/// Raises:
///     InvalidArgument, Unsupported: before anything is written; the message names argument, value, rule.
///
/// Example:
///     >>> import numpy as np, ferromla
///     >>> cache = ferromla.quantize_kv(np.ones((4, 64, 576), np.float16), "fp8_v32")
///     >>> cache.shape, cache.dtype.name
///     ((4, 64, 656), 'uint8')
#[pyfunction]
#[pyo3(signature = (kv, kv_format, *, kv_scale=None, round_scale=true, out=None))]
pub fn quantize_kv<'py>(
    py: Python<'py>,
    kv: &Bound<'py, PyAny>,
    kv_format: &str,
    kv_scale: Option<Number>,
    round_scale: bool,
    out: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let kv = tensor::read(kv, "kv")?;
    let format = KvFormat::parse(kv_format).map_err(errors::to_python)?;
    let out = arguments::output(out, "out", || new_cache(&kv, format))?;
    let args = QuantizeArgs {
        kv: kv.view,
        out: out.view,
        kv_format: format,
        kv_scale: kv_scale.map(Number::get),
        round_scale,
        stream: framework::current_stream(&kv)?,
    };
    // SAFETY: every view borrows a tensor that lives to the end of this function; on CUDA the framework's
    // allocator orders reuse after the work queued on its stream.
    arguments::run(py, kv.view.device(), || unsafe {
        ferromla::quantize_kv(&args)
    })?;
    Ok(out.object)
}

/// A cache for the pages of `kv`.
fn new_cache<'py>(kv: &Tensor<'py>, format: KvFormat) -> PyResult<Tensor<'py>> {
    let shape = kv.view.shape();
    let &[num_pages, page_size, .., d_qk] = &shape[..] else {
        let value = format!("of shape {shape}");
        let rule = "must be [num_pages, page_size, d_qk] or [num_pages, page_size, 1, d_qk]";
        return Err(errors::invalid("kv", value, rule));
    };
    if !format.d_qk().contains(&d_qk) {
        let widths: Vec<_> = format.d_qk().iter().map(i64::to_string).collect();
        let value = format!("of shape {shape}");
        let rule = format!(
            "rows of the format {format} have {} numbers",
            widths.join(" or ")
        );
        return Err(errors::invalid("kv", value, rule));
    }
    let cache =
        ferromla::cache_shape(num_pages, page_size, format, d_qk).map_err(errors::to_python)?;
    framework::pages(kv, "out", &cache)
}

/// Dequantises a whole cache: the float32 product of each code and its scale, rounded to the dtype of the result.
///
/// Args:
///     cache: `[n, P, bytes]` or `[n, P, 1, bytes]`, uint8, int8 or float8_e4m3fn.
///     kv_format: of the cache; None for `"fp8"` where its dtype is float8_e4m3fn.
///     kv_scale: what the numbers of an `"fp8"` cache are multiplied by; 1 when None. Only for that format.
///     out: `[n, P, d_qk]` bfloat16 or float32 to write to.
///     dtype: of a new result: `"bfloat16"`, `"float32"`, or a dtype of that name; bfloat16 when None. With `out`
///         None, or the dtype of it.
///
/// Returns:
///     `out`, or a new `[n, P, d_qk]`.
///
/// Raises:
///     InvalidArgument, Unsupported: before anything is written; the message names argument, value, rule.
///
/// Example:
///     >>> import numpy as np, ferromla
///     >>> cache = ferromla.quantize_kv(np.full((4, 64, 512), 3, np.float32), "fp4_v41")
///     >>> rows = ferromla.dequantize_kv(cache, "fp4_v41", dtype="float32")
///     >>> rows.shape, float(rows.min()), float(rows.max())
///     ((4, 64, 512), 3.0, 3.0)
#[pyfunction]
#[pyo3(signature = (cache, kv_format=None, *, kv_scale=None, out=None, dtype=None))]
pub fn dequantize_kv<'py>(
    py: Python<'py>,
    cache: &Bound<'py, PyAny>,
    kv_format: Option<&str>,
    kv_scale: Option<Number>,
    out: Option<&Bound<'py, PyAny>>,
    dtype: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let cache = tensor::read(cache, "cache")?;
    let kv_format = arguments::kv_format("kv_format", kv_format)?;
    let dtype = dtype.map(result_dtype).transpose()?;
    let out = arguments::output(out, "out", || {
        let width =
            ferromla::cache_d_qk(&Parts::One(cache.view), kv_format).map_err(errors::to_python)?;
        let shape = [&cache.view.shape()[..2], &[width]].concat();
        framework::empty(&cache, "out", &shape, dtype.unwrap_or(DType::Bf16))
    })?;
    if let Some(dtype) = dtype.filter(|&dtype| dtype != out.view.dtype()) {
        let rule = format!("must be None or that of out, {}", out.view.dtype());
        return Err(errors::invalid("dtype", dtype, rule));
    }
    let args = DequantizeArgs {
        cache: cache.view,
        out: out.view,
        kv_format,
        kv_scale: kv_scale.map(Number::get),
        stream: framework::current_stream(&cache)?,
    };
    // SAFETY: as in `quantize_kv`.
    arguments::run(py, cache.view.device(), || unsafe {
        ferromla::dequantize_kv(&args)
    })?;
    Ok(out.object)
}

/// `"float32"`, `torch.float32`, `numpy.float32`, `numpy.dtype("float32")`; bfloat16 likewise.
fn result_dtype(object: &Bound<'_, PyAny>) -> PyResult<DType> {
    let name = match object
        .getattr("__name__")
        .or_else(|_| object.getattr("name"))
    {
        Ok(name) => name.to_string(),
        Err(_) => object.str()?.to_string(),
    };
    match name.rsplit('.').next() {
        Some("bfloat16") => Ok(DType::Bf16),
        Some("float32") => Ok(DType::F32),
        _ => Err(errors::invalid(
            "dtype",
            name,
            "must be bfloat16 or float32",
        )),
    }
}
