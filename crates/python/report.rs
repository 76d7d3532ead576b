//! `support`: what runs on a device, as plain Python data.

use ferromla::{Device, Support};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::arguments;

/// What is supported on a device: operation x format x dtype x heads x page size, as plain data.
///
/// Args:
///     device: `"cpu"`, `"cuda:0"` or the like; None for the first CUDA device where it can be used and
///         for the CPU otherwise.
///
/// Returns:
///     A dict: `device`; `backend`, one of `"cuda"`, `"cpu"`, `"none"`; `device_name`; `kernels`, the CUDA
///     kernels in this build; `compiler`, what compiled them; `reason`, why CUDA cannot be used where it cannot; and
///     `operations`, a list of dicts with `operation`, `kv_format`, `extra_kv_formats` of an extra cache beside it,
///     `dtype` (of queries, of rows that are written or read, or of indices), `d_qk`, `heads`, `kv_heads`, `page_sizes`.
///
/// Example:
///     >>> import ferromla
///     >>> ferromla.support("cpu")["backend"]
///     'cpu'
#[pyfunction]
#[pyo3(signature = (device=None))]
pub fn support<'py>(
    py: Python<'py>,
    device: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    if let Some(device) = device {
        return describe(py, &ferromla::support(arguments::device(device)?));
    }
    let cuda = ferromla::support(Device::Cuda(0));
    if cuda.backend != "none" {
        return describe(py, &cuda);
    }
    let mut cpu = ferromla::support(Device::Cpu);
    cpu.reason = cuda.reason;
    describe(py, &cpu)
}

fn describe<'py>(py: Python<'py>, support: &Support) -> PyResult<Bound<'py, PyDict>> {
    let operations = PyList::empty(py);
    for row in &support.rows {
        let entry = PyDict::new(py);
        entry.set_item("operation", row.operation)?;
        entry.set_item("kv_format", row.kv_format.map(|format| format.name()))?;
        let extra = row.extra_kv_formats.iter().map(|format| format.name());
        entry.set_item("extra_kv_formats", PyList::new(py, extra)?)?;
        entry.set_item("dtype", row.dtype.name())?;
        entry.set_item("d_qk", row.d_qk)?;
        entry.set_item("heads", row.heads)?;
        entry.set_item("kv_heads", row.kv_heads)?;
        entry.set_item("page_sizes", row.page_sizes)?;
        operations.append(entry)?;
    }
    let report = PyDict::new(py);
    report.set_item("device", support.device.to_string())?;
    report.set_item("backend", support.backend)?;
    report.set_item("device_name", &support.device_name)?;
    report.set_item("kernels", &support.kernels)?;
    report.set_item("compiler", &support.compiler)?;
    report.set_item("reason", &support.reason)?;
    report.set_item("operations", operations)?;
    Ok(report)
}
