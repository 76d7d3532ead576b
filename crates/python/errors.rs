//! The crate's errors as Python exceptions.

use ferromla::Error;
use pyo3::create_exception;
use pyo3::exceptions::{PyNotImplementedError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

create_exception!(
    ferromla,
    InvalidArgument,
    PyValueError,
    "An argument whose shape, dtype, device, stride, alignment or value is not allowed. Its attributes\n\
     `argument`, `value` and `rule` say which one, what it was and what is allowed. Nothing was written."
);
create_exception!(
    ferromla,
    Unsupported,
    PyNotImplementedError,
    "A combination that is valid but that this build or device does not offer. Attributes as for\n\
     `InvalidArgument`. Nothing was written."
);
create_exception!(
    ferromla,
    CudaError,
    PyRuntimeError,
    "A call of the CUDA driver failed: attributes `call`, `code` (the CUresult) and `message`."
);

/// The exception for an error of the crate.
pub fn to_python(error: Error) -> PyErr {
    let text = error.to_string();
    Python::attach(|py| match error {
        Error::InvalidArgument {
            argument,
            value,
            rule,
        } => with_attributes(py, InvalidArgument::new_err(text), argument, &value, &rule),
        Error::Unsupported {
            argument,
            value,
            rule,
        } => with_attributes(py, Unsupported::new_err(text), argument, &value, &rule),
        Error::Cuda {
            call,
            code,
            message,
        } => {
            let exception = CudaError::new_err(text);
            let value = exception.value(py);
            let set = value
                .setattr("call", call)
                .and_then(|()| value.setattr("code", code))
                .and_then(|()| value.setattr("message", message));
            set.err().unwrap_or(exception)
        }
        _ => PyRuntimeError::new_err(text),
    })
}

/// An `InvalidArgument` raised by the binding itself.
pub fn invalid(argument: &'static str, value: impl ToString, rule: impl ToString) -> PyErr {
    to_python(Error::invalid(argument, value, rule))
}

/// An `Unsupported` raised by the binding itself.
pub fn unsupported(argument: &'static str, value: impl ToString, rule: impl ToString) -> PyErr {
    to_python(Error::unsupported(argument, value, rule))
}

fn with_attributes(
    py: Python<'_>,
    exception: PyErr,
    argument: &str,
    value: &str,
    rule: &str,
) -> PyErr {
    let object = exception.value(py);
    let set = object
        .setattr("argument", argument)
        .and_then(|()| object.setattr("value", value))
        .and_then(|()| object.setattr("rule", rule));
    set.err().unwrap_or(exception)
}
