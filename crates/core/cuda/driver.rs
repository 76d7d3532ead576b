//! The driver: whether there is one, what its result codes say, and which context is current.

use std::ffi::CStr;
use std::sync::OnceLock;

use cudarc::driver::sys;

use crate::error::{Error, Result};
use crate::view::Stream;

use super::handle;
use super::images::RELEASE;

/// The oldest driver with every entry point used here, as `cuDriverGetVersion` counts (CUDA 12.4).
const OLDEST_DRIVER: i32 = 12_040;

/// Handles up to this one are names of default streams: 0, the legacy one and that of a thread.
const LAST_DEFAULT_STREAM: u64 = 2;

/// Turns a result code into an error with the driver's own text.
pub(super) fn call(name: &'static str, code: sys::CUresult) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the driver is loaded, for it gave the code; the text is a static string of its own.
    let known = unsafe { sys::cuGetErrorString(code, &mut text) };
    let message = if known == sys::CUresult::CUDA_SUCCESS && !text.is_null() {
        // SAFETY: as above.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    } else {
        "unknown to this driver".to_owned()
    };
    Err(Error::Cuda {
        call: name,
        code: code as i32,
        message,
    })
}

/// Loads and initialises the driver, once.
pub(super) fn init() -> Result<()> {
    static INIT: OnceLock<Result<()>> = OnceLock::new();
    INIT.get_or_init(|| {
        // SAFETY: looks for the library, no more. Calling anything else without it would panic.
        if !unsafe { sys::is_culib_present() } {
            let message = "there is no NVIDIA driver library (libcuda) on this machine".to_owned();
            return Err(Error::Cuda {
                call: "cuInit",
                code: -1,
                message,
            });
        }
        let mut version = 0;
        // SAFETY: the library is there, and these two are in every driver.
        unsafe {
            call("cuInit", sys::cuInit(0))?;
            call("cuDriverGetVersion", sys::cuDriverGetVersion(&mut version))?;
        }
        too_old(version, RELEASE.0).map_or(Ok(()), |message| {
            Err(Error::Cuda {
                call: "cuDriverGetVersion",
                code: -1,
                message,
            })
        })
    })
    .clone()
}

/// Why a driver of this version, as `cuDriverGetVersion` counts, does not do for kernels that nvcc of CUDA `major` compiled: it reads what compilers
/// of its own major version make, and of earlier ones.
fn too_old(version: i32, major: i32) -> Option<String> {
    let named = |version| format!("{}.{}", version / 1000, version % 1000 / 10);
    let driver = format!("the driver is for CUDA {}", named(version));
    if version < OLDEST_DRIVER {
        let oldest = named(OLDEST_DRIVER);
        return Some(format!("{driver}, at least {oldest} is needed"));
    }
    (version / 1000 < major).then(|| {
        format!(
            "{driver}, and this build's kernels are for CUDA {major}: a later driver reads them, or build with nvcc of CUDA {} (FERROMLA_NVCC)",
            version / 1000
        )
    })
}

/// Makes a context current, and the one before it again when dropped.
#[must_use]
pub(super) struct Entered {
    pushed: bool,
}

impl Entered {
    /// # Safety
    /// The context is live.
    pub unsafe fn new(context: sys::CUcontext) -> Result<Self> {
        let pushed = current()? != context;
        if pushed {
            // SAFETY: the context is live (the caller's promise).
            call("cuCtxPushCurrent", unsafe {
                sys::cuCtxPushCurrent_v2(context)
            })?;
        }
        Ok(Self { pushed })
    }

    /// For work on the stream. A green context of the device stays current if the stream is a default one, which is that context's own then.
    ///
    /// # Safety
    /// The context is the device's, and live.
    pub unsafe fn of_stream(
        device: sys::CUdevice,
        context: sys::CUcontext,
        stream: Stream,
    ) -> Result<Self> {
        let current = current()?;
        if current == context || (!current.is_null() && is_green(device, stream)?) {
            return Ok(Self { pushed: false });
        }
        // SAFETY: the caller's promise.
        unsafe { Self::new(context) }
    }
}

/// The context that is current, if any.
fn current() -> Result<sys::CUcontext> {
    let mut current = std::ptr::null_mut();
    // SAFETY: the driver is initialised, since there is a context to compare with.
    call("cuCtxGetCurrent", unsafe {
        sys::cuCtxGetCurrent(&mut current)
    })?;
    Ok(current)
}

impl Drop for Entered {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: pops what `new` pushed on this thread; nothing can be done about a failure.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}

/// Whether the context that is current is a green one of the device, and the stream its default stream.
fn is_green(device: sys::CUdevice, stream: Stream) -> Result<bool> {
    let mut of_current = device;
    // SAFETY: a context is current.
    call("cuCtxGetDevice", unsafe {
        sys::cuCtxGetDevice(&mut of_current)
    })?;
    if of_current != device || stream.0 > LAST_DEFAULT_STREAM {
        return Ok(false);
    }
    let mut green = std::ptr::null_mut();
    // SAFETY: as above, and every context has default streams.
    call("cuStreamGetGreenCtx", unsafe {
        sys::cuStreamGetGreenCtx(handle(stream), &mut green)
    })?;
    Ok(!green.is_null())
}

/// Lets this thread do what a global stream capture forbids (loading modules) until dropped.
#[must_use]
pub(super) struct RelaxedCapture {
    before: sys::CUstreamCaptureMode,
}

impl RelaxedCapture {
    /// # Safety
    /// The driver is initialised.
    pub unsafe fn new() -> Result<Self> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the caller's promise; `mode` receives the thread's mode.
        call("cuThreadExchangeStreamCaptureMode", unsafe {
            sys::cuThreadExchangeStreamCaptureMode(&mut mode)
        })?;
        Ok(Self { before: mode })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // SAFETY: restores what `new` found; nothing can be done about a failure.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.before) };
    }
}

#[cfg(test)]
mod tests {
    use super::too_old;

    #[test]
    fn drivers_before_the_compiler_s_major_version_are_told_apart() {
        for (version, major) in [
            (13_000, 13),
            (13_050, 13),
            (14_000, 13),
            (12_040, 12),
            (13_000, 12),
            (13_000, 0),
        ] {
            assert_eq!(too_old(version, major), None);
        }
        let said = |version, major| too_old(version, major).unwrap();
        assert!(
            said(12_080, 13).starts_with(
                "the driver is for CUDA 12.8, and this build's kernels are for CUDA 13"
            )
        );
        assert!(said(12_080, 13).contains("nvcc of CUDA 12 (FERROMLA_NVCC)"));
        assert_eq!(
            said(12_030, 12),
            "the driver is for CUDA 12.3, at least 12.4 is needed"
        );
        assert_eq!(
            said(12_030, 13),
            "the driver is for CUDA 12.3, at least 12.4 is needed"
        );
    }
}
