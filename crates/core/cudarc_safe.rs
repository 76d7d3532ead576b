//! Views of cudarc's own slices and streams, for callers on the cudarc version that this crate is built with.
//! Others pass raw pointers and handles.

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};

use crate::dtype::{DType, Device};
use crate::error::Result;
use crate::view::{Stream, View, within_slice};

impl From<&CudaStream> for Stream {
    fn from(stream: &CudaStream) -> Self {
        Self(stream.cu_stream() as u64)
    }
}

/// A view of a slice, and what tells cudarc when the work on it has been queued: dropped after the call that
/// uses the view.
#[must_use]
pub struct Borrowed<'a> {
    view: View,
    _sync: SyncOnDrop<'a>,
}

impl Borrowed<'_> {
    /// The view, to be used while the borrow lives.
    pub const fn view(&self) -> View {
        self.view
    }
}

impl std::fmt::Debug for Borrowed<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.view.fmt(f)
    }
}

/// A row-major view of a slice that work on `stream` reads. `dtype` says what the elements are: 16-bit floats
/// may be any 16-bit Rust type.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error) when the shape is not within the slice or `dtype` has another size than `T`.
pub fn read<'a, T>(
    slice: &'a impl DevicePtr<T>,
    dtype: DType,
    shape: &[i64],
    stream: &'a CudaStream,
) -> Result<Borrowed<'a>> {
    within_slice::<T>(slice.len(), dtype, shape)?;
    let (ptr, sync) = slice.device_ptr(stream);
    Ok(borrowed(ptr, sync, dtype, shape, stream))
}

/// A row-major view of a slice that work on `stream` writes. As [`read`].
///
/// # Errors
/// As [`read`].
pub fn write<'a, T>(
    slice: &'a mut impl DevicePtrMut<T>,
    dtype: DType,
    shape: &[i64],
    stream: &'a CudaStream,
) -> Result<Borrowed<'a>> {
    within_slice::<T>(slice.len(), dtype, shape)?;
    let (ptr, sync) = slice.device_ptr_mut(stream);
    Ok(borrowed(ptr, sync, dtype, shape, stream))
}

fn borrowed<'a>(
    ptr: u64,
    sync: SyncOnDrop<'a>,
    dtype: DType,
    shape: &[i64],
    stream: &CudaStream,
) -> Borrowed<'a> {
    let device = Device::Cuda(stream.context().ordinal() as u32);
    // SAFETY: the slice holds the shape and is borrowed as long as the result.
    let view = unsafe { View::contiguous(ptr as *const _, dtype, device, shape) };
    Borrowed { view, _sync: sync }
}
