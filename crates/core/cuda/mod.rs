//! The last step on CUDA: problems to launch parameters, launches on the caller's stream.
//!
//! Nothing here allocates on the device or waits for it, so every operation can be captured in a graph, but for two
//! that a capture refuses: `upload_plan`, which may wait until the driver has staged the host's words, as these are
//! pageable, and `download`. The engine of a device (`engine.rs`) is made at first use, during a capture too.

mod attention;
mod cache_ops;
mod divisor;
mod driver;
#[cfg(test)]
mod emulated;
mod engine;
mod images;
mod indices;
mod kernel;
mod kv_cache;
mod ops;
mod tensor_map;
mod variant;

use std::ffi::c_void;

use cudarc::driver::sys;

pub(crate) use attention::{decode, sparse};
pub(crate) use cache_ops::{append, dequantize, gather, quantize};
pub(crate) use indices::{combine_topk_window, to_physical, window_token_ids};
pub(crate) use kernel::{compiled_kernels, compiler};
pub(crate) use ops::{merge, plan};

use crate::error::{Error, Result};
use crate::support::CudaSupport;
use crate::view::Stream;
use driver::call;
use engine::Engine;
use ferromla_schedule::Target;

/// What [`support`](crate::support) tells of a device that the kernels run on.
pub(crate) fn support(ordinal: u32) -> Result<CudaSupport> {
    Ok(CudaSupport {
        device_name: Engine::get(ordinal)?.name.clone(),
    })
}

/// What plans are to know of a device.
pub(crate) fn target(ordinal: u32) -> Result<Target> {
    let engine = Engine::get(ordinal)?;
    Ok(Target::Gpu {
        sm_count: engine.sm_count,
        clusters: engine.clusters,
        memory: engine.memory,
    })
}

/// Copies a plan made on the host to the device, in stream order.
///
/// # Safety
/// `to` is live device memory of the plan's size. The host words may be dropped on return: the driver stages
/// copies from pageable memory before it returns.
pub(crate) unsafe fn upload_plan(
    ordinal: u32,
    words: &[i32],
    to: u64,
    stream: Stream,
) -> Result<()> {
    let engine = Engine::get(ordinal)?;
    let _context = engine.enter(stream)?;
    if is_captured(stream)? {
        let value = "on cpu while the stream is captured";
        let rule = "on the device, to plan in a graph";
        return Err(Error::invalid("seq_lens", value, rule));
    }
    // SAFETY: both sides hold `words` (the caller's promise), and the context is current.
    let copy = unsafe {
        sys::cuMemcpyHtoDAsync_v2(
            to,
            words.as_ptr().cast(),
            size_of_val(words),
            handle(stream),
        )
    };
    call("cuMemcpyHtoDAsync", copy)
}

/// Copies from the device, and waits for it.
///
/// # Safety
/// `from` is live device memory of the size of `values`, and any bytes are a `T`.
pub(crate) unsafe fn download<T: Copy>(
    ordinal: u32,
    from: u64,
    values: &mut [T],
    stream: Stream,
) -> Result<()> {
    let engine = Engine::get(ordinal)?;
    let _context = engine.enter(stream)?;
    if is_captured(stream)? {
        let rule = "not captured while FERROMLA_CHECK is set";
        return Err(Error::invalid("stream", "being captured", rule));
    }
    let to: *mut c_void = values.as_mut_ptr().cast();
    // SAFETY: both sides hold `values` (the caller's promise), and the copy has ended before this returns.
    unsafe {
        call(
            "cuMemcpyDtoHAsync",
            sys::cuMemcpyDtoHAsync_v2(to, from, size_of_val(values), handle(stream)),
        )?;
        call(
            "cuStreamSynchronize",
            sys::cuStreamSynchronize(handle(stream)),
        )
    }
}

fn handle(stream: Stream) -> sys::CUstream {
    stream.0 as sys::CUstream
}

fn is_captured(stream: Stream) -> Result<bool> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream is the caller's, the status is local.
    call("cuStreamIsCapturing", unsafe {
        sys::cuStreamIsCapturing(handle(stream), &mut status)
    })?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}
