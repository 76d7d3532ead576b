//! Arguments shared by several functions: pairs of tensors, formats, devices, numbers with a rule.

use ferromla::{Device, KvFormat, Parts, Result};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyInt, PyList, PyTuple};

use crate::errors;
use crate::framework;
use crate::tensor::{self, Tensor};

/// One tensor, or a `(512-wide, 64-wide)` pair of them; `first` is the one whose framework and device count.
pub struct Pair<'py> {
    pub first: Tensor<'py>,
    second: Option<Tensor<'py>>,
}

impl<'py> Pair<'py> {
    pub fn read(
        object: &Bound<'py, PyAny>,
        argument: &'static str,
        writable: bool,
    ) -> PyResult<Self> {
        let read = if writable {
            tensor::read_output
        } else {
            tensor::read
        };
        if !object.is_instance_of::<PyTuple>() && !object.is_instance_of::<PyList>() {
            return Ok(Pair {
                first: read(object, argument)?,
                second: None,
            });
        }
        let length = object.len()?;
        if length != 2 {
            return Err(errors::invalid(
                argument,
                format!("a sequence of {length}"),
                "must be one tensor or a pair (latent part, rotary part)",
            ));
        }
        let first = read(&object.get_item(0)?, argument)?;
        let second = Some(read(&object.get_item(1)?, argument)?);
        Ok(Pair { first, second })
    }

    pub fn parts(&self) -> Parts {
        match &self.second {
            None => Parts::One(self.first.view),
            Some(second) => Parts::Two(self.first.view, second.view),
        }
    }

    pub fn device(&self) -> Device {
        self.first.view.device()
    }
}

/// An output: the caller's tensor, or a new one like `like`.
pub fn output<'py>(
    given: Option<&Bound<'py, PyAny>>,
    argument: &'static str,
    make: impl FnOnce() -> PyResult<Tensor<'py>>,
) -> PyResult<Tensor<'py>> {
    match given {
        Some(object) => tensor::read_output(object, argument),
        None => make(),
    }
}

/// The caller's workspace, or a new one like `like` where the call needs one.
pub fn workspace<'py>(
    bytes: u64,
    like: &Tensor<'py>,
    given: Option<&Bound<'py, PyAny>>,
) -> PyResult<Option<Tensor<'py>>> {
    match (given, bytes) {
        (Some(given), _) => tensor::read_output(given, "workspace").map(Some),
        (None, 0) => Ok(None),
        (None, bytes) => framework::bytes(like, like.view.device(), bytes).map(Some),
    }
}

/// A format by name; None stays None.
pub fn kv_format(argument: &'static str, name: Option<&str>) -> PyResult<Option<KvFormat>> {
    name.map(|name| KvFormat::parse_as(argument, name))
        .transpose()
        .map_err(errors::to_python)
}

/// A number of splits. Numbers beyond 32 bits mean no more than the largest.
pub fn num_splits(given: Option<i64>) -> PyResult<Option<u32>> {
    match given {
        None => Ok(None),
        Some(number) if number < 1 => Err(errors::invalid(
            "num_splits",
            number,
            "must be at least 1, or None for the scheduler's choice",
        )),
        Some(number) => Ok(Some(u32::try_from(number).unwrap_or(u32::MAX))),
    }
}

/// A number that is in host memory: reading one on a GPU would wait for it, and cannot be captured.
#[derive(Clone, Copy)]
pub struct Number(f64);

impl Number {
    pub fn get(self) -> f64 {
        self.0
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Number {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let plain = object.is_instance_of::<PyFloat>() || object.is_instance_of::<PyInt>();
        // A tensor whose dtype that protocol does not have raises instead of saying no.
        if !plain && !matches!(object.hasattr("__cuda_array_interface__"), Ok(false)) {
            let class = object.get_type().qualname()?;
            let rule = "must be a number: reading one on a GPU would wait for the device";
            return Err(PyTypeError::new_err(format!("a {class} on a GPU: {rule}")));
        }
        object.extract().map(Self)
    }
}

/// What the `lse` of rows that see no key is to be.
pub fn empty_lse(given: Option<Number>) -> f32 {
    given.map_or(f32::NEG_INFINITY, |lse| lse.get() as f32)
}

/// How many tokens a call finds that writes where each request's begin, the last of `offsets` being their number: `run`
/// makes it without room for any. Where the host can read that.
pub fn counted(
    lens: &Tensor<'_>,
    offsets: &Tensor<'_>,
    run: impl FnOnce() -> PyResult<()>,
) -> PyResult<i64> {
    if lens.view.device().is_cuda() {
        let rule = "must be given, or out: reading the lengths would wait for the device";
        return Err(errors::invalid("num_tokens", "None", rule));
    }
    run()?;
    let (shape, strides) = (offsets.view.shape(), offsets.view.strides());
    let last = (shape[0] - 1) * strides[0];
    let first = offsets.view.ptr() as *const i64;
    // SAFETY: an int64 array of at least one element in host memory, as the call has checked.
    Ok(unsafe { first.wrapping_offset(last as isize).read() })
}

/// A number of tokens that there is to be room for.
pub fn num_tokens(given: Option<i64>) -> PyResult<Option<i64>> {
    match given {
        Some(count) if !(0..=i32::MAX.into()).contains(&count) => {
            let rule = format!("must be between 0 and {}, or None", i32::MAX);
            Err(errors::invalid("num_tokens", count, rule))
        }
        _ => Ok(given),
    }
}

/// `"cpu"`, `"cuda"` for the framework's current device, `"cuda:1"`, or anything that prints as one of them (a
/// `torch.device`).
pub fn device(object: &Bound<'_, PyAny>) -> PyResult<Device> {
    let name = object.str()?.to_string();
    let ordinal = match name.as_str() {
        "cpu" => return Ok(Device::Cpu),
        "cuda" => Some(framework::current_device(object.py())?),
        other => other
            .strip_prefix("cuda:")
            .and_then(|ordinal| ordinal.parse().ok()),
    };
    ordinal.map(Device::Cuda).ok_or_else(|| {
        errors::invalid(
            "device",
            format!("{name:?}"),
            "must be \"cpu\", \"cuda\" or \"cuda:<ordinal>\"",
        )
    })
}

/// Refuses an argument that the others leave no meaning.
pub fn absent(
    object: Option<&Bound<'_, PyAny>>,
    argument: &'static str,
    rule: &str,
) -> PyResult<()> {
    match object {
        None => Ok(()),
        Some(object) => {
            let class = object.get_type().qualname()?;
            Err(errors::unsupported(argument, format!("a {class}"), rule))
        }
    }
}

/// Runs an operation: beside other Python threads on the CPU, where it computes; holding the GIL on CUDA,
/// where it only launches and giving up the GIL would cost more than the launch.
pub fn run(
    py: Python<'_>,
    device: Device,
    operation: impl FnOnce() -> Result<()> + Send,
) -> PyResult<()> {
    let result = if device.is_cuda() {
        operation()
    } else {
        py.detach(operation)
    };
    result.map_err(errors::to_python)
}
