//! What is asked of the caller's framework: its current stream, and memory of its own for results.

use ferromla::{CacheShape, DType, Device, Stream};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PySlice, PyTuple};

use crate::errors;
use crate::tensor::{self, Access, Exchange, Framework, Tensor, abi};

/// The stream that the framework of `tensor` queues work on now; the default stream for a framework that
/// has no notion of one.
pub fn current_stream(tensor: &Tensor<'_>) -> PyResult<Stream> {
    let Device::Cuda(ordinal) = tensor.view.device() else {
        return Ok(Stream::default());
    };
    stream_of(tensor.object.py(), tensor.kind, ordinal)
}

fn stream_of(py: Python<'_>, kind: tensor::Kind, ordinal: u32) -> PyResult<Stream> {
    if let Access::Exchange(Exchange {
        current_stream: Some(current),
        ..
    }) = kind.access
    {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the table is alive for good, `stream` is ours to fill, and the GIL is held.
        let status = unsafe { current(abi::DEVICE_CUDA, ordinal as i32, &mut stream) };
        return if status == 0 {
            Ok(Stream(stream as u64))
        } else {
            Err(PyErr::fetch(py))
        };
    }
    let handle = match kind.framework {
        Framework::Torch => py
            .import(intern!(py, "torch._C"))?
            .call_method1(intern!(py, "_cuda_getCurrentRawStream"), (ordinal,))?,
        Framework::Cupy => py
            .import(intern!(py, "cupy.cuda"))?
            .call_method1(intern!(py, "get_current_stream"), (ordinal,))?
            .getattr(intern!(py, "ptr"))?,
        Framework::Numpy | Framework::Other => return Ok(Stream::default()),
    };
    Ok(Stream(handle.extract()?))
}

fn is_loaded(py: Python<'_>, module: &str) -> PyResult<bool> {
    let modules = py.import(intern!(py, "sys"))?;
    modules.getattr(intern!(py, "modules"))?.contains(module)
}

/// The current device of the framework that is loaded, torch's where both are; 0 where none has one.
pub fn current_device(py: Python<'_>) -> PyResult<u32> {
    if is_loaded(py, "torch")? {
        let cuda = py.import("torch.cuda")?;
        if cuda.call_method0("is_initialized")?.extract()? {
            return cuda.call_method0("current_device")?.extract();
        }
    }
    if is_loaded(py, "cupy")? {
        let runtime = py.import("cupy.cuda.runtime")?;
        return runtime.call_method0("getDevice")?.extract();
    }
    Ok(0)
}

/// Fills a tensor of a framework that ferromla allocates for, in the order of its current stream.
pub fn fill(tensor: &Tensor<'_>, value: f32) -> PyResult<()> {
    let name = match tensor.kind.framework {
        Framework::Torch => "fill_",
        Framework::Numpy | Framework::Cupy => "fill",
        Framework::Other => return Ok(()),
    };
    tensor.object.call_method1(name, (value,)).map(drop)
}

/// An uninitialised tensor of `like`'s framework on its device.
pub fn empty<'py>(
    like: &Tensor<'py>,
    argument: &'static str,
    shape: &[i64],
    dtype: DType,
) -> PyResult<Tensor<'py>> {
    let object = match like.kind.framework {
        Framework::Torch => torch_like(like, shape, dtype)?,
        Framework::Numpy => numpy(like.object.py(), shape, dtype)?,
        Framework::Cupy => cupy(like.object.py(), like.view.device(), shape, dtype)?,
        Framework::Other => {
            let class = like.object.get_type().qualname()?;
            return Err(errors::invalid(
                argument,
                "None",
                format!("must be given, since ferromla cannot allocate a {class}"),
            ));
        }
    };
    tensor::read_new(&object, argument)
}

/// An uninitialised cache of `like`'s framework on its device, the pages as far apart as `cache` says.
pub fn pages<'py>(
    like: &Tensor<'py>,
    argument: &'static str,
    cache: &CacheShape,
) -> PyResult<Tensor<'py>> {
    let &[num_pages, page_size, width] = &cache.shape[..] else {
        return empty(like, argument, &cache.shape, cache.dtype);
    };
    let (page, used) = (cache.strides[0], page_size * width);
    if page == used {
        return empty(like, argument, &cache.shape, cache.dtype);
    }
    let padded = empty(like, argument, &[num_pages, page], cache.dtype)?.object;
    let py = padded.py();
    let index = (PySlice::full(py), PySlice::new(py, 0, used as isize, 1));
    // A view: the tokens of a page are divided, its end is left out.
    let shape = (num_pages, page_size, width);
    let object = padded.get_item(index)?.call_method1("reshape", shape)?;
    tensor::read_new(&object, argument)
}

/// Uninitialised bytes on `device`, which need not be the device of `near`: the workspace of a plan.
pub fn bytes<'py>(near: &Tensor<'py>, device: Device, count: u64) -> PyResult<Tensor<'py>> {
    let py = near.object.py();
    let shape = [i64::try_from(count).unwrap_or(i64::MAX)];
    let unknown_on_cpu = near.kind.framework == Framework::Other && device == Device::Cpu;
    if near.view.device() == device && !unknown_on_cpu {
        return empty(near, "workspace", &shape, DType::U8);
    }
    let object = match (device, near.kind.framework) {
        (_, Framework::Torch) => torch(py, device, &shape, DType::U8)?,
        (Device::Cuda(_), Framework::Cupy) => cupy(py, device, &shape, DType::U8)?,
        _ => return bytes_anywhere(py, device, count),
    };
    tensor::read_new(&object, "workspace")
}

/// Uninitialised bytes on `device`, of whichever framework is there.
pub fn bytes_anywhere(py: Python<'_>, device: Device, count: u64) -> PyResult<Tensor<'_>> {
    let shape = [i64::try_from(count).unwrap_or(i64::MAX)];
    let object = match device {
        Device::Cpu => numpy(py, &shape, DType::U8)?,
        _ if is_loaded(py, "torch")? => torch(py, device, &shape, DType::U8)?,
        _ if py.import("cupy").is_ok() => cupy(py, device, &shape, DType::U8)?,
        _ => {
            return Err(errors::invalid(
                "workspace",
                "None",
                format!(
                    "must be given: neither torch nor cupy is loaded to allocate it on {device}"
                ),
            ));
        }
    };
    tensor::read_new(&object, "workspace")
}

/// The stream for work on `device` asked for by way of `near`, which may live elsewhere.
pub fn stream_on(near: &Tensor<'_>, workspace: &Tensor<'_>, device: Device) -> PyResult<Stream> {
    current_stream(if near.view.device() == device {
        near
    } else {
        workspace
    })
}

fn torch_like<'py>(like: &Tensor<'py>, shape: &[i64], dtype: DType) -> PyResult<Bound<'py, PyAny>> {
    let py = like.object.py();
    // The sizes one by one: torch asks a tuple whether it is a number first, at a third of the call's time.
    let shape = match shape {
        [] => PyTuple::new(py, [PyTuple::empty(py)])?,
        sizes => PyTuple::new(py, sizes)?,
    };
    if dtype == like.view.dtype() {
        return like.object.call_method1(intern!(py, "new_empty"), shape);
    }
    let options = of_dtype(py, dtype)?;
    like.object
        .call_method(intern!(py, "new_empty"), shape, Some(&options))
}

fn torch<'py>(
    py: Python<'py>,
    device: Device,
    shape: &[i64],
    dtype: DType,
) -> PyResult<Bound<'py, PyAny>> {
    let options = of_dtype(py, dtype)?;
    options.set_item("device", device.to_string())?;
    py.import("torch")?
        .call_method("empty", (PyTuple::new(py, shape)?,), Some(&options))
}

/// The keyword arguments of a torch function that makes a tensor of this type.
fn of_dtype(py: Python<'_>, dtype: DType) -> PyResult<Bound<'_, PyDict>> {
    let options = PyDict::new(py);
    options.set_item(intern!(py, "dtype"), torch_dtype(py, dtype)?)?;
    Ok(options)
}

fn torch_dtype(py: Python<'_>, dtype: DType) -> PyResult<Bound<'_, PyAny>> {
    static FLOAT32: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    static UINT8: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let find = || Ok::<_, PyErr>(py.import("torch")?.getattr(dtype.name())?.unbind());
    match dtype {
        // The two that a decode call asks for.
        DType::F32 => FLOAT32
            .get_or_try_init(py, find)
            .map(|found| found.bind(py).clone()),
        DType::U8 => UINT8
            .get_or_try_init(py, find)
            .map(|found| found.bind(py).clone()),
        _ => find().map(|found| found.into_bound(py)),
    }
}

/// numpy's name for a type; bfloat16 and float8_e4m3fn are those of the ml_dtypes package.
fn numpy_dtype(py: Python<'_>, dtype: DType) -> PyResult<Bound<'_, PyAny>> {
    if matches!(dtype, DType::Bf16 | DType::F8E4M3) {
        return py
            .import("ml_dtypes")
            .map_err(|_| {
                let rule = format!(
                    "numpy and cupy hold {dtype} with the package ml_dtypes, which is not installed; install it, \
                     or use torch tensors"
                );
                errors::unsupported("out", dtype, rule)
            })?
            .getattr(dtype.name());
    }
    py.import("numpy")?.getattr(dtype.name())
}

fn numpy<'py>(py: Python<'py>, shape: &[i64], dtype: DType) -> PyResult<Bound<'py, PyAny>> {
    py.import("numpy")?
        .call_method1("empty", (PyTuple::new(py, shape)?, numpy_dtype(py, dtype)?))
}

fn cupy<'py>(
    py: Python<'py>,
    device: Device,
    shape: &[i64],
    dtype: DType,
) -> PyResult<Bound<'py, PyAny>> {
    let Device::Cuda(ordinal) = device else {
        return numpy(py, shape, dtype);
    };
    let module = py.import("cupy")?;
    let scope = module.getattr("cuda")?.call_method1("Device", (ordinal,))?;
    scope.call_method0("__enter__")?;
    let result = module.call_method1("empty", (PyTuple::new(py, shape)?, numpy_dtype(py, dtype)?));
    scope.call_method1("__exit__", (py.None(), py.None(), py.None()))?;
    result
}
