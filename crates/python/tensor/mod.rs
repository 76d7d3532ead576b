//! Tensors of any framework as borrowed views: through the C exchange table where the type has one, then
//! `__dlpack__`, then the array-interface attributes.

pub mod abi;
mod interface;
pub mod kind;

use std::ffi::c_void;

use ferromla::{DType, Device, View};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::errors;
pub use kind::{Access, Exchange, Framework, Kind};

const RULE: &str = "must be a tensor that speaks DLPack or an array interface";

/// A borrowed tensor: the Python object keeps the memory, `view` describes it.
pub struct Tensor<'py> {
    pub object: Bound<'py, PyAny>,
    pub view: View,
    pub kind: Kind,
    /// The DLPack capsule whose arrays and memory the view borrows, where there is one.
    _keep: Option<Bound<'py, PyAny>>,
    read_only: bool,
}

/// Why an object is not taken as a tensor, before the argument's name is known.
pub enum Refusal {
    Rule { value: String, rule: String },
    Python(PyErr),
}

impl Refusal {
    fn new(value: impl Into<String>, rule: impl Into<String>) -> Refusal {
        Refusal::Rule {
            value: value.into(),
            rule: rule.into(),
        }
    }

    fn name(self, argument: &'static str) -> PyErr {
        match self {
            Refusal::Rule { value, rule } => errors::invalid(argument, value, rule),
            Refusal::Python(error) => error,
        }
    }
}

impl From<PyErr> for Refusal {
    fn from(error: PyErr) -> Refusal {
        Refusal::Python(error)
    }
}

/// What a tensor is to a call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Input,
    Output,
    /// An output that its framework has just made for the call.
    New,
}

/// Reads an input tensor.
pub fn read<'py>(object: &Bound<'py, PyAny>, argument: &'static str) -> PyResult<Tensor<'py>> {
    borrow(object, Role::Input).map_err(|refusal| refusal.name(argument))
}

/// [`read`], where there is one.
pub fn read_optional<'py>(
    object: Option<&Bound<'py, PyAny>>,
    argument: &'static str,
) -> PyResult<Option<Tensor<'py>>> {
    object.map(|object| read(object, argument)).transpose()
}

/// Reads a tensor that will be written: read-only memory is refused.
pub fn read_output<'py>(
    object: &Bound<'py, PyAny>,
    argument: &'static str,
) -> PyResult<Tensor<'py>> {
    borrow(object, Role::Output).map_err(|refusal| refusal.name(argument))
}

/// Reads a tensor that has just been made: it is writable, has no gradient and is not negated.
pub fn read_new<'py>(object: &Bound<'py, PyAny>, argument: &'static str) -> PyResult<Tensor<'py>> {
    borrow(object, Role::New).map_err(|refusal| refusal.name(argument))
}

fn borrow<'py>(object: &Bound<'py, PyAny>, role: Role) -> Result<Tensor<'py>, Refusal> {
    let kind = kind::of(object)?;
    let tensor = match kind.access {
        Access::Exchange(table) => exchange(object, kind, table)?,
        Access::Protocol => match protocol(object, kind)? {
            Some(tensor) => tensor,
            None => attributes(object, kind)?.ok_or_else(|| not_a_tensor(object))?,
        },
        Access::Attributes => match attributes(object, kind)? {
            Some(tensor) => tensor,
            None => protocol(object, kind)?.ok_or_else(|| not_a_tensor(object))?,
        },
        Access::Opaque => {
            let name = class_name(object);
            return Err(Refusal::new(
                format!("a {name}"),
                "must be a plain torch.Tensor with memory of its own",
            ));
        }
    };
    if role != Role::New && kind.framework == Framework::Torch {
        check_torch(&tensor)?;
    }
    if role == Role::Output && tensor.read_only {
        return Err(Refusal::new("a read-only array", "must be writable"));
    }
    Ok(tensor)
}

fn not_a_tensor(object: &Bound<'_, PyAny>) -> Refusal {
    Refusal::new(format!("a {}", class_name(object)), RULE)
}

fn class_name(object: &Bound<'_, PyAny>) -> String {
    object
        .get_type()
        .qualname()
        .map_or_else(|_| "object".to_owned(), |name| name.to_string())
}

fn exchange<'py>(
    object: &Bound<'py, PyAny>,
    kind: Kind,
    table: Exchange,
) -> Result<Tensor<'py>, Refusal> {
    let mut raw = abi::Tensor::empty();
    // SAFETY: the table belongs to this object's type, `raw` is ours to fill, and the GIL is held.
    let status = unsafe { (table.fill)(object.as_ptr().cast(), &mut raw) };
    if status != 0 {
        return Err(producer_refused(object, PyErr::fetch(object.py())));
    }
    // SAFETY: filled by the producer, whose object is alive: its shape and strides are readable now.
    let view = unsafe { view(&raw) }?;
    Ok(Tensor {
        object: object.clone(),
        view,
        kind,
        _keep: None,
        read_only: false,
    })
}

/// Through `__dlpack__`; None where the object has no such method or cannot export this array.
fn protocol<'py>(object: &Bound<'py, PyAny>, kind: Kind) -> Result<Option<Tensor<'py>>, Refusal> {
    let py = object.py();
    let Ok(method) = object.getattr(intern!(py, "__dlpack__")) else {
        return Ok(None);
    };
    let (device, _): (i32, i32) = object
        .call_method0(intern!(py, "__dlpack_device__"))?
        .extract()?;
    let arguments = PyDict::new(py);
    if device == abi::DEVICE_CUDA || device == abi::DEVICE_CUDA_MANAGED {
        // -1: no synchronisation. The work is queued on the framework's own current stream.
        arguments.set_item(intern!(py, "stream"), -1)?;
    }
    arguments.set_item(intern!(py, "max_version"), (abi::MAJOR_VERSION, 0))?;
    let capsule = match method.call((), Some(&arguments)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            // A producer from before version 1.0 does not know the argument.
            arguments.del_item(intern!(py, "max_version"))?;
            method.call((), Some(&arguments))
        }
        result => result,
    };
    let Ok(capsule) = capsule else {
        return Ok(None);
    };
    let (view, read_only) = open(&capsule)?;
    Ok(Some(Tensor {
        object: object.clone(),
        view,
        kind,
        _keep: Some(capsule),
        read_only,
    }))
}

/// The tensor in a DLPack capsule. It is not consumed: dropping the capsule gives the tensor back.
fn open(capsule: &Bound<'_, PyAny>) -> Result<(View, bool), Refusal> {
    let capsule = capsule
        .cast::<PyCapsule>()
        .map_err(|_| Refusal::new("no capsule from __dlpack__", RULE))?;
    if let Some(pointer) = capsule_pointer(capsule, abi::VERSIONED_CAPSULE) {
        // SAFETY: a capsule of this name holds this structure, and the capsule is alive.
        let managed = unsafe { &*pointer.cast::<abi::ManagedTensorVersioned>() };
        if managed.version.major != abi::MAJOR_VERSION {
            return Err(Refusal::new(
                format!("DLPack version {}", managed.version.major),
                "must be DLPack 1",
            ));
        }
        // SAFETY: the capsule keeps the tensor's arrays alive.
        let view = unsafe { view(&managed.tensor) }?;
        return Ok((view, managed.flags & abi::FLAG_READ_ONLY != 0));
    }
    let Some(pointer) = capsule_pointer(capsule, abi::LEGACY_CAPSULE) else {
        return Err(Refusal::new("a capsule of another kind", RULE));
    };
    // SAFETY: the first field of the unversioned managed tensor is the tensor; the capsule is alive.
    let view = unsafe { view(&*pointer.cast::<abi::Tensor>()) }?;
    Ok((view, false))
}

fn capsule_pointer(capsule: &Bound<'_, PyCapsule>, name: &std::ffi::CStr) -> Option<*mut c_void> {
    // SAFETY: the capsule is alive and the name a C string; both calls only compare and read.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) == 0 {
            return None;
        }
        Some(ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()))
    }
}

fn attributes<'py>(object: &Bound<'py, PyAny>, kind: Kind) -> Result<Option<Tensor<'py>>, Refusal> {
    let Some((view, read_only)) = interface::view(object)? else {
        return Ok(None);
    };
    Ok(Some(Tensor {
        object: object.clone(),
        view,
        kind,
        _keep: None,
        read_only,
    }))
}

/// # Safety
/// `raw`'s shape and strides must be readable for `ndim` elements.
unsafe fn view(raw: &abi::Tensor) -> Result<View, Refusal> {
    let dims = usize::try_from(raw.ndim).map_err(|_| Refusal::new("a negative rank", RULE))?;
    let dtype = dtype(raw.dtype);
    let device = device(raw.device)?;
    let pointer = raw
        .data
        .cast_const()
        .wrapping_byte_add(raw.byte_offset as usize);
    if dims == 0 {
        // SAFETY: the caller's contract; no arrays are read.
        return Ok(unsafe { View::new(pointer, dtype, device, &[], &[]) });
    }
    // SAFETY: the caller's contract.
    let shape = unsafe { std::slice::from_raw_parts(raw.shape, dims) };
    if raw.strides.is_null() {
        // SAFETY: before DLPack 1.2 no strides meant contiguous.
        return Ok(unsafe { View::contiguous(pointer, dtype, device, shape) });
    }
    // SAFETY: the caller's contract.
    let strides = unsafe { std::slice::from_raw_parts(raw.strides, dims) };
    // SAFETY: the producer describes memory that its object keeps alive.
    Ok(unsafe { View::new(pointer, dtype, device, shape, strides) })
}

/// Names a DLPack element type. Any type gets a name: whether it is allowed is the operation's business.
fn dtype(raw: abi::DataType) -> DType {
    match (raw.code, raw.bits, raw.lanes) {
        (0, 8, 1) => DType::I8,
        (0, 16, 1) => DType::I16,
        (0, 32, 1) => DType::I32,
        (0, 64, 1) => DType::I64,
        (1, 8, 1) => DType::U8,
        (1, 16, 1) => DType::U16,
        (1, 32, 1) => DType::U32,
        (1, 64, 1) => DType::U64,
        (2, 16, 1) => DType::Fp16,
        (2, 32, 1) => DType::F32,
        (2, 64, 1) => DType::F64,
        (4, 16, 1) => DType::Bf16,
        (6, 8, 1) => DType::Bool,
        (10, 8, 1) => DType::F8E4M3,
        (12, 8, 1) => DType::F8E5M2,
        (14, 8, 1) => DType::F8E8M0,
        (17, 4, 2) => DType::F4E2M1,
        _ => DType::Other,
    }
}

fn device(raw: abi::Device) -> Result<Device, Refusal> {
    match raw.kind {
        abi::DEVICE_CPU | abi::DEVICE_CUDA_HOST => Ok(Device::Cpu),
        abi::DEVICE_CUDA | abi::DEVICE_CUDA_MANAGED => Ok(Device::Cuda(raw.id.max(0) as u32)),
        other => Err(Refusal::new(
            format!("DLPack device type {other}"),
            "must be on the CPU or a CUDA device",
        )),
    }
}

fn producer_refused(object: &Bound<'_, PyAny>, error: PyErr) -> Refusal {
    Refusal::new(
        format!("a {} that exports no DLPack ({error})", class_name(object)),
        RULE,
    )
}

/// What the exchange table passes on though its memory does not tell the whole tensor.
fn check_torch(tensor: &Tensor<'_>) -> Result<(), Refusal> {
    let dtype = tensor.view.dtype();
    // The parts of complex numbers, which may be lazily negated, have these types.
    let of_complex = matches!(dtype, DType::Fp16 | DType::F32 | DType::F64);
    if !of_complex && !matches!(dtype, DType::Bf16 | DType::F8E4M3) {
        return Ok(());
    }
    let (py, object) = (tensor.object.py(), &tensor.object);
    if object.getattr(intern!(py, "requires_grad"))?.is_truthy()? && grad_enabled(py)? {
        return Err(Refusal::new(
            "a tensor that requires grad",
            "has no gradient here: pass tensor.detach() or call under torch.no_grad()",
        ));
    }
    if of_complex && object.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
        return Err(Refusal::new(
            "a lazily negated view",
            "must hold its values: pass tensor.resolve_neg()",
        ));
    }
    Ok(())
}

fn grad_enabled(py: Python<'_>) -> PyResult<bool> {
    py.import(intern!(py, "torch"))?
        .call_method0(intern!(py, "is_grad_enabled"))?
        .is_truthy()
}
