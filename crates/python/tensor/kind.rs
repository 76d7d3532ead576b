//! What is known of a tensor's Python type, looked up once per type.

use std::sync::OnceLock;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyType};

use super::abi;

/// The package a tensor comes from: decides how outputs and workspace are allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Framework {
    Torch,
    Numpy,
    Cupy,
    Other,
}

/// How the memory behind an object of one type is found.
#[derive(Clone, Copy)]
pub enum Access {
    /// Through the C exchange table of the type.
    Exchange(Exchange),
    /// Through `__dlpack__`, then the array-interface attributes.
    Protocol,
    /// Through the array-interface attributes, then `__dlpack__`: numpy, whose `__dlpack__` knows neither
    /// bfloat16 nor, before numpy 2.1, read-only arrays.
    Attributes,
    /// A torch subclass that dispatches on its own: it may have no memory at all (fake tensors).
    Opaque,
}

/// The functions of an exchange table that are used; they stay valid for the life of the process.
#[derive(Clone, Copy)]
pub struct Exchange {
    pub fill: abi::TensorFromObject,
    pub current_stream: Option<abi::CurrentStream>,
}

#[derive(Clone, Copy)]
pub struct Kind {
    pub framework: Framework,
    pub access: Access,
}

/// Types seen so far, one after another: read without a lock. They are few; where there is no place left (types made
/// in a loop) nothing more is kept. A type in here is never freed, so that its address stays its own.
static SEEN: [OnceLock<(Py<PyType>, Kind)>; 64] = [const { OnceLock::new() }; 64];

/// The kind of `object`'s type.
pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Kind> {
    let key = object.get_type_ptr();
    let seen = SEEN.iter().map_while(OnceLock::get);
    for (class, kind) in seen {
        if class.as_ptr() == key.cast() {
            return Ok(*kind);
        }
    }
    let class = object.get_type();
    let kind = inspect(&class)?;
    let mut entry = (class.unbind(), kind);
    for place in &SEEN {
        match place.set(entry) {
            Ok(()) => break,
            Err(back) => entry = back,
        }
    }
    Ok(kind)
}

fn inspect(class: &Bound<'_, PyType>) -> PyResult<Kind> {
    let framework = framework(class)?;
    let access = match framework {
        Framework::Torch if dispatches(class)? => Access::Opaque,
        Framework::Numpy => Access::Attributes,
        _ => exchange_table(class).map_or(Access::Protocol, Access::Exchange),
    };
    Ok(Kind { framework, access })
}

/// The framework of the nearest base class that belongs to one.
fn framework(class: &Bound<'_, PyType>) -> PyResult<Framework> {
    for base in class.mro().iter() {
        let Ok(module) = base
            .getattr("__module__")
            .and_then(|m| m.extract::<String>())
        else {
            continue;
        };
        match module.split('.').next() {
            Some("torch") => return Ok(Framework::Torch),
            Some("numpy") => return Ok(Framework::Numpy),
            Some("cupy" | "_cupy") => return Ok(Framework::Cupy),
            _ => {}
        }
    }
    Ok(Framework::Other)
}

/// Whether a torch type overrides `__torch_dispatch__`, as fake and functional tensors do.
fn dispatches(class: &Bound<'_, PyType>) -> PyResult<bool> {
    let py = class.py();
    let base = py.import("torch")?.getattr("Tensor")?;
    if class.is(&base) {
        return Ok(false);
    }
    // Both are C descriptors or class methods made anew by each attribute access: compare the raw entries.
    for ancestor in class.mro().iter() {
        if ancestor.is(&base) {
            return Ok(false);
        }
        if ancestor
            .getattr("__dict__")?
            .contains("__torch_dispatch__")?
        {
            return Ok(!ancestor
                .getattr("__torch_dispatch__")?
                .is(&disabled_dispatch(py)?));
        }
    }
    Ok(false)
}

/// What `torch.nn.Parameter` and other plain subclasses set to say that they do not dispatch.
fn disabled_dispatch(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    py.import("torch._C")?
        .getattr("_disabled_torch_dispatch_impl")
}

/// The type's exchange table of a version we read, following the chain to older ones.
fn exchange_table(class: &Bound<'_, PyType>) -> Option<Exchange> {
    let attribute = class.getattr("__dlpack_c_exchange_api__").ok()?;
    let capsule = attribute.cast::<PyCapsule>().ok()?;
    // SAFETY: the capsule is alive and the name is a C string; a capsule of another name gives null.
    let pointer =
        unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), abi::EXCHANGE_CAPSULE.as_ptr()) };
    if pointer.is_null() {
        drop(PyErr::take(class.py()));
        return None;
    }
    let mut header: *const abi::ExchangeHeader = pointer.cast();
    // SAFETY: the protocol keeps every table of the chain alive for the life of the process, and the header's
    // layout is the same in all versions.
    while let Some(current) = unsafe { header.as_ref() } {
        if current.version.major == abi::MAJOR_VERSION {
            // SAFETY: a table of this major version has this layout, and lives as long as the process.
            let table = unsafe { &*header.cast::<abi::ExchangeApi>() };
            let fill = table.tensor_from_object?;
            return Some(Exchange {
                fill,
                current_stream: table.current_stream,
            });
        }
        header = current.previous;
    }
    None
}
