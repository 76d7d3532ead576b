//! Memory, a stream and graphs of CUDA device 0, through the driver.

use std::cell::RefCell;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;
use ferromla::{Device, Stream};

use super::memory::Memory;

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// One test at a time: what a global capture forbids, it forbids to every thread.
static IN_USE: Mutex<()> = Mutex::new(());

/// Device 0 with its primary context current and a stream of its own.
pub struct Gpu {
    _alone: MutexGuard<'static, ()>,
    stream: sys::CUstream,
    blocks: RefCell<Vec<u64>>,
}

impl Gpu {
    pub fn new() -> Self {
        let alone = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut device, mut context, mut stream) = (0, std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: each call gets what the one before gave.
        unsafe {
            ok(sys::cuInit(0));
            ok(sys::cuDeviceGet(&mut device, 0));
            ok(sys::cuDevicePrimaryCtxRetain(&mut context, device));
            ok(sys::cuCtxSetCurrent(context));
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            ok(sys::cuStreamCreate(&mut stream, flags));
        }
        Self {
            _alone: alone,
            stream,
            blocks: RefCell::default(),
        }
    }

    pub fn stream(&self) -> Stream {
        Stream(self.stream as u64)
    }
}

impl Memory for Gpu {
    fn device(&self) -> Device {
        Device::Cuda(0)
    }

    fn upload<T: Copy>(&self, values: &[T]) -> u64 {
        let mut ptr = 0;
        // SAFETY: allocates at least one byte in the current context.
        ok(unsafe { sys::cuMemAlloc_v2(&mut ptr, size_of_val(values).max(16)) });
        self.blocks.borrow_mut().push(ptr);
        self.write(ptr, values, self.stream());
        // SAFETY: waits, so that any stream may use the memory.
        ok(unsafe { sys::cuCtxSynchronize() });
        ptr
    }

    fn write<T: Copy>(&self, to: u64, values: &[T], stream: Stream) {
        // SAFETY: `to` is a block of at least this size; the copy has ended before the values go.
        unsafe {
            ok(sys::cuMemcpyHtoDAsync_v2(
                to,
                values.as_ptr().cast(),
                size_of_val(values),
                stream.0 as _,
            ));
            ok(sys::cuStreamSynchronize(stream.0 as _));
        }
    }

    fn download<T: Copy + Default>(&self, from: u64, len: usize, stream: Stream) -> Vec<T> {
        let mut values = vec![T::default(); len];
        // SAFETY: `from` is a block of at least this size; the copy has ended before the values are read.
        unsafe {
            ok(sys::cuMemcpyDtoHAsync_v2(
                values.as_mut_ptr().cast(),
                from,
                size_of_val(&values[..]),
                stream.0 as _,
            ));
            ok(sys::cuStreamSynchronize(stream.0 as _));
        }
        values
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: the blocks and the stream are this value's own, and nothing runs on them any more.
        unsafe {
            let _ = sys::cuCtxSynchronize();
            for &block in self.blocks.borrow().iter() {
                let _ = sys::cuMemFree_v2(block);
            }
            let _ = sys::cuStreamDestroy_v2(self.stream);
        }
    }
}

/// A captured and instantiated graph.
pub struct Graph {
    executable: sys::CUgraphExec,
    stream: sys::CUstream,
}

impl Graph {
    /// Captures what `work` launches on the GPU's stream, in the mode torch uses.
    pub fn capture(gpu: &Gpu, work: impl FnOnce()) -> Self {
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream is live and not captured; the graph is what the capture gave.
        unsafe {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
            ok(sys::cuStreamBeginCapture_v2(gpu.stream, mode));
            work();
            ok(sys::cuStreamEndCapture(gpu.stream, &mut graph));
            ok(sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0));
            ok(sys::cuGraphDestroy(graph));
        }
        Self {
            executable,
            stream: gpu.stream,
        }
    }

    pub fn replay(&self) {
        // SAFETY: the graph is instantiated, and its memory live as long as the GPU.
        unsafe {
            ok(sys::cuGraphLaunch(self.executable, self.stream));
            ok(sys::cuStreamSynchronize(self.stream));
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the graph is this value's own, and no replay is running.
        let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
    }
}
