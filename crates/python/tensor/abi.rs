//! The C structures of the DLPack ABI (major version 1), as much of it as a borrowing consumer reads.

use std::ffi::{c_int, c_void};

/// The major version of the ABI that these structures describe.
pub const MAJOR_VERSION: u32 = 1;
/// Name of the capsule that holds an [`ExchangeApi`].
pub const EXCHANGE_CAPSULE: &std::ffi::CStr = c"dlpack_exchange_api";
/// Name of the capsule that holds a [`ManagedTensorVersioned`].
pub const VERSIONED_CAPSULE: &std::ffi::CStr = c"dltensor_versioned";
/// Name of the capsule that holds a managed tensor from before version 1.0: its first field is the [`Tensor`].
pub const LEGACY_CAPSULE: &std::ffi::CStr = c"dltensor";
/// The flag of a tensor that must not be written.
pub const FLAG_READ_ONLY: u64 = 1;

pub const DEVICE_CPU: i32 = 1;
pub const DEVICE_CUDA: i32 = 2;
pub const DEVICE_CUDA_HOST: i32 = 3;
pub const DEVICE_CUDA_MANAGED: i32 = 13;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Device {
    pub kind: i32,
    pub id: i32,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct DataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tensor {
    pub data: *mut c_void,
    pub device: Device,
    pub ndim: i32,
    pub dtype: DataType,
    pub shape: *const i64,
    pub strides: *const i64,
    pub byte_offset: u64,
}

#[repr(C)]
pub struct ManagedTensorVersioned {
    pub version: Version,
    pub manager_ctx: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut ManagedTensorVersioned)>,
    pub flags: u64,
    pub tensor: Tensor,
}

#[repr(C)]
pub struct ExchangeHeader {
    pub version: Version,
    /// A table of an older version, or null.
    pub previous: *const ExchangeHeader,
}

/// The function table of `type.__dlpack_c_exchange_api__`. Functions that are not called here keep their place only.
#[repr(C)]
pub struct ExchangeApi {
    pub header: ExchangeHeader,
    pub allocator: *const c_void,
    pub managed_from_object: *const c_void,
    pub managed_to_object: *const c_void,
    /// May be null.
    pub tensor_from_object: Option<TensorFromObject>,
    pub current_stream: Option<CurrentStream>,
}

/// Fills a caller's [`Tensor`], whose arrays the object (the first argument) keeps; 0 on success, else a
/// Python exception is set.
pub type TensorFromObject = unsafe extern "C" fn(*mut c_void, *mut Tensor) -> c_int;
/// Gives the framework's current stream of a device (type, ordinal); 0 on success.
pub type CurrentStream = unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int;

impl Tensor {
    /// A tensor to be filled by a producer.
    pub const fn empty() -> Tensor {
        Tensor {
            data: std::ptr::null_mut(),
            device: Device {
                kind: DEVICE_CPU,
                id: 0,
            },
            ndim: 0,
            dtype: DataType {
                code: 0,
                bits: 0,
                lanes: 0,
            },
            shape: std::ptr::null(),
            strides: std::ptr::null(),
            byte_offset: 0,
        }
    }
}
