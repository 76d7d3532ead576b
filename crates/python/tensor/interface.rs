//! Tensors described by attributes: `__array_interface__` (numpy) and `__cuda_array_interface__` (cupy, numba).

use ferromla::{DType, Device, View};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::{RULE, Refusal};

/// A view from whichever interface `object` has; None where it has neither.
pub fn view(object: &Bound<'_, PyAny>) -> Result<Option<(View, bool)>, Refusal> {
    if let Ok(interface) = object.getattr("__array_interface__") {
        return describe(object, &interface, Device::Cpu).map(Some);
    }
    // cupy raises AttributeError here for types it cannot describe: then there is nothing more to try.
    if let Ok(interface) = object.getattr("__cuda_array_interface__") {
        let device = cuda_device(object)?;
        return describe(object, &interface, device).map(Some);
    }
    Ok(None)
}

fn describe(
    object: &Bound<'_, PyAny>,
    interface: &Bound<'_, PyAny>,
    device: Device,
) -> Result<(View, bool), Refusal> {
    let interface = interface
        .cast::<PyDict>()
        .map_err(|_| Refusal::new("an interface that is no dict", RULE))?;
    let entry = |name: &str| -> Result<Bound<'_, PyAny>, Refusal> {
        interface
            .get_item(name)?
            .ok_or_else(|| Refusal::new(format!("no entry {name:?}"), RULE))
    };
    let typestr: String = entry("typestr")?.extract()?;
    let (dtype, size) = dtype(object, &typestr)?;
    let (address, read_only): (u64, bool) = entry("data")?.extract()?;
    let shape: Vec<i64> = entry("shape")?.extract()?;
    let byte_strides: Option<Vec<i64>> = match interface.get_item("strides")? {
        Some(strides) => strides.extract()?,
        None => None,
    };
    let Some(byte_strides) = byte_strides else {
        // SAFETY: `object` describes memory it keeps alive; the caller of `read` holds `object`.
        return Ok((
            unsafe { View::contiguous(address as *const _, dtype, device, &shape) },
            read_only,
        ));
    };
    let mut strides = Vec::with_capacity(byte_strides.len());
    for stride in byte_strides {
        if stride % size != 0 {
            return Err(Refusal::new(
                format!("a stride of {stride} bytes"),
                format!("strides must be whole elements of {size} bytes"),
            ));
        }
        strides.push(stride / size);
    }
    // SAFETY: as above.
    Ok((
        unsafe { View::new(address as *const _, dtype, device, &shape, &strides) },
        read_only,
    ))
}

/// The element type and its size in bytes. ml_dtypes types have void typestrs: their name tells.
fn dtype(object: &Bound<'_, PyAny>, typestr: &str) -> Result<(DType, i64), Refusal> {
    let unknown = |name: &str| {
        Refusal::new(
            format!("dtype {name}"),
            "must be a supported dtype in native byte order",
        )
    };
    Ok(match typestr.trim_start_matches(['<', '|', '=']) {
        "f2" => (DType::Fp16, 2),
        "f4" => (DType::F32, 4),
        "f8" => (DType::F64, 8),
        "i1" => (DType::I8, 1),
        "i2" => (DType::I16, 2),
        "i4" => (DType::I32, 4),
        "i8" => (DType::I64, 8),
        "u1" => (DType::U8, 1),
        "u2" => (DType::U16, 2),
        "u4" => (DType::U32, 4),
        "u8" => (DType::U64, 8),
        "b1" => (DType::Bool, 1),
        "V1" | "V2" => {
            let name: String = object.getattr("dtype")?.getattr("name")?.extract()?;
            match name.as_str() {
                "bfloat16" => (DType::Bf16, 2),
                "float8_e4m3fn" => (DType::F8E4M3, 1),
                "float8_e5m2" => (DType::F8E5M2, 1),
                "float8_e8m0fnu" => (DType::F8E8M0, 1),
                other => return Err(unknown(other)),
            }
        }
        other => return Err(unknown(other)),
    })
}

/// The device of an object with a `__cuda_array_interface__`, which does not say it itself.
fn cuda_device(object: &Bound<'_, PyAny>) -> Result<Device, Refusal> {
    if let Ok(pair) = object.call_method0("__dlpack_device__") {
        let (_, id): (i32, u32) = pair.extract()?;
        return Ok(Device::Cuda(id));
    }
    let id = object
        .getattr("device")
        .and_then(|device| device.getattr("id"))
        .and_then(|id| id.extract());
    Ok(Device::Cuda(id.unwrap_or(0)))
}
