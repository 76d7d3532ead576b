//! The PyO3 module `ferromla._ferromla`: tensors of any framework in, the crate's operations, the caller's
//! kind of tensor out. Nothing is decided here that a Rust caller would need too: checks and meaning are the
//! crate's.
#![allow(missing_docs)] // a binary module: its documentation is the Python docstrings

mod arguments;
mod attention;
mod cache;
mod errors;
mod framework;
mod indices;
mod list_lens;
mod plan;
mod quantize;
mod report;
mod sparse;
mod tensor;
mod workspace;

use pyo3::prelude::*;

#[pymodule]
fn _ferromla(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("InvalidArgument", py.get_type::<errors::InvalidArgument>())?;
    module.add("Unsupported", py.get_type::<errors::Unsupported>())?;
    module.add("CudaError", py.get_type::<errors::CudaError>())?;
    module.add_class::<plan::Plan>()?;
    module.add_function(wrap_pyfunction!(attention::decode, module)?)?;
    module.add_function(wrap_pyfunction!(attention::prefill, module)?)?;
    module.add_function(wrap_pyfunction!(attention::merge_states, module)?)?;
    module.add_function(wrap_pyfunction!(sparse::sparse_decode, module)?)?;
    module.add_function(wrap_pyfunction!(sparse::sparse_prefill, module)?)?;
    module.add_function(wrap_pyfunction!(workspace::workspace_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(cache::append_kv, module)?)?;
    module.add_function(wrap_pyfunction!(cache::gather_kv, module)?)?;
    module.add_function(wrap_pyfunction!(quantize::quantize_kv, module)?)?;
    module.add_function(wrap_pyfunction!(quantize::dequantize_kv, module)?)?;
    module.add_function(wrap_pyfunction!(cache::cache_shape, module)?)?;
    module.add_function(wrap_pyfunction!(indices::to_physical, module)?)?;
    module.add_function(wrap_pyfunction!(indices::window_token_ids, module)?)?;
    module.add_function(wrap_pyfunction!(indices::combine_topk_window, module)?)?;
    module.add_function(wrap_pyfunction!(report::support, module)?)?;
    Ok(())
}
