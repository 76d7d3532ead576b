//! One engine per device: its primary context, its loaded kernels, and the launcher.

use std::ffi::{CStr, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::sys;

use crate::error::{Error, Result};
use crate::view::Stream;

use super::driver::{Entered, RelaxedCapture, call, init};
use super::handle;
use super::images::{IMAGES, WITHOUT_KERNELS, image};
use super::kernel::Kernel;

/// The kernels are compiled for this compute capability only.
const COMPUTE_CAPABILITY: (i32, i32) = (9, 0);
/// CTAs of the largest cluster: more than every GPU has to offer, so that a kernel must be allowed it.
const MOST_CLUSTER: u32 = 16;
/// More devices than a machine has.
const MAX_DEVICES: usize = 64;

/// A device the kernels run on.
#[derive(Debug)]
pub(super) struct Engine {
    device: sys::CUdevice,
    /// Of no context: each runs in that of its stream.
    kernels: Kernels,
    /// Loaded as long as their kernels may be launched.
    _libraries: Vec<Library>,
    context: PrimaryContext,
    pub sm_count: i32,
    /// What its memory's clock and width give, GB/s.
    pub memory: i32,
    /// Clusters of 2, 4, 8 and 16 attention CTAs that run at once.
    pub clusters: [i32; 4],
    pub name: String,
}

// SAFETY: contexts, libraries and kernels are handles that the driver lets any thread use.
unsafe impl Send for Engine {}
// SAFETY: as for `Send`; nothing in an engine changes.
unsafe impl Sync for Engine {}

/// The context that the CUDA runtime uses, retained: until the process ends where an engine has it, which is never dropped.
#[derive(Debug)]
struct PrimaryContext {
    device: sys::CUdevice,
    handle: sys::CUcontext,
}

impl PrimaryContext {
    fn retain(device: sys::CUdevice) -> Result<Self> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the driver is initialised, since the device is one of its own.
        call("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&mut handle, device)
        })?;
        Ok(Self { device, handle })
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // SAFETY: gives back what `retain` took; nothing can be done about a failure.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// A loaded image.
#[derive(Debug)]
struct Library(sys::CUlibrary);

impl Library {
    /// # Safety
    /// A context is current, and the image is a whole cubin.
    unsafe fn load(cubin: &[u8]) -> Result<Self> {
        let mut library = std::ptr::null_mut();
        let none = std::ptr::null_mut::<c_void>();
        // SAFETY: the caller's promise; there are no options.
        call("cuLibraryLoadData", unsafe {
            sys::cuLibraryLoadData(
                &mut library,
                cubin.as_ptr().cast(),
                none.cast(),
                none.cast(),
                0,
                none.cast(),
                none.cast(),
                0,
            )
        })?;
        Ok(Self(library))
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: nobody launches its kernels any more; nothing can be done about a failure.
        let _ = unsafe { sys::cuLibraryUnload(self.0) };
    }
}

/// How a kernel is launched.
#[derive(Debug, Default)]
pub(super) struct Launch {
    /// Of single blocks, or of teams: the grid's first dimension.
    pub blocks: u32,
    /// Blocks of a team, the second; 0 or 1: no teams.
    pub team: u32,
    pub threads: u32,
    /// Blocks of one cluster, which divides `team`; 0 or 1: none.
    pub cluster: u32,
    pub stream: Stream,
}

impl Engine {
    /// The engine of this device, made at first use. A failure is not kept: the next call tries again.
    pub fn get(ordinal: u32) -> Result<&'static Self> {
        static ENGINES: [OnceLock<Engine>; MAX_DEVICES] = [const { OnceLock::new() }; MAX_DEVICES];
        static MAKING: Mutex<()> = Mutex::new(());
        let Some(cell) = ENGINES.get(ordinal as usize) else {
            let rule = format!("ordinals are below {MAX_DEVICES}");
            return Err(Error::invalid("device", format!("cuda:{ordinal}"), rule));
        };
        if let Some(engine) = cell.get() {
            return Ok(engine);
        }
        let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        if cell.get().is_none() {
            let engine = Self::new(ordinal)?;
            return Ok(cell.get_or_init(|| engine));
        }
        Self::get(ordinal)
    }

    fn new(ordinal: u32) -> Result<Self> {
        if let Some(reason) = WITHOUT_KERNELS {
            return Err(Error::unsupported(
                "device",
                format!("cuda:{ordinal}"),
                reason,
            ));
        }
        init()?;
        let (device, name) = device(ordinal)?;
        let context = PrimaryContext::retain(device)?;
        // SAFETY: the context has just been retained and outlives this.
        let _entered = unsafe { Entered::new(context.handle)? };
        // SAFETY: the driver is initialised.
        let _relaxed = unsafe { RelaxedCapture::new()? };
        let sm_count = attribute(
            device,
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )?;
        let (libraries, kernels) = load(device)?;
        Ok(Self {
            device,
            clusters: clusters(&kernels)?,
            kernels,
            sm_count,
            memory: memory(device),
            name,
            _libraries: libraries,
            context,
        })
    }

    /// Makes the context of the stream current until the result is dropped.
    pub fn enter(&self, stream: Stream) -> Result<Entered> {
        // SAFETY: the context is the device's, retained for the life of the process.
        unsafe { Entered::of_stream(self.device, self.context.handle, stream) }
    }

    /// Launches, with the stream's context current.
    ///
    /// # Safety
    /// `arguments` point at values of the kernel's parameter types, in order; what those describe is live
    /// until the stream has passed.
    pub unsafe fn launch(
        &self,
        kernel: Kernel,
        launch: &Launch,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let Some(loaded) = self.kernels[kernel.index()] else {
            let value = kernel.name().to_string_lossy();
            let rule = format!(
                "kernels/{}.cu is not in this build: rebuild with its feature",
                kernel.image()
            );
            return Err(Error::unsupported("kernel", value, rule));
        };
        let mut attributes = launch.attributes();
        let config = launch.config(kernel, &mut attributes);
        // SAFETY: the arguments are right (the caller's promise); the driver copies them before it returns.
        let result = unsafe {
            sys::cuLaunchKernelEx(
                &config,
                loaded.cast(), // a kernel of no context is passed as a function
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        call("cuLaunchKernelEx", result)
    }
}

impl Launch {
    /// What the driver wants to know; it points to those of `attributes` that the launch has.
    fn config(
        &self,
        kernel: Kernel,
        attributes: &mut [sys::CUlaunchAttribute; 2],
    ) -> sys::CUlaunchConfig {
        let attributes = &mut attributes[..self.used_attributes()];
        sys::CUlaunchConfig {
            gridDimX: self.blocks,
            gridDimY: self.team.max(1),
            gridDimZ: 1,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: kernel.shared_bytes(),
            hStream: handle(self.stream),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        }
    }

    /// That the launch may begin while the one before it ends; and its clusters.
    fn attributes(&self) -> [sys::CUlaunchAttribute; 2] {
        use sys::CUlaunchAttributeID as Id;
        let early = sys::CUlaunchAttributeValue {
            programmaticStreamSerializationAllowed: 1,
        };
        let clusters = sys::CUlaunchAttributeValue {
            clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
                x: 1,
                y: self.cluster,
                z: 1,
            },
        };
        [
            (
                Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                early,
            ),
            (Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, clusters),
        ]
        .map(|(id, value)| sys::CUlaunchAttribute {
            id,
            pad: [0; 4],
            value,
        })
    }

    /// How many of [`Launch::attributes`] it has: the first always, since every kernel waits for earlier launches before it
    /// touches what is not its own; the second if there are clusters.
    fn used_attributes(&self) -> usize {
        1 + usize::from(self.cluster > 1)
    }
}

/// The device's handle and name, if the kernels run on it.
fn device(ordinal: u32) -> Result<(sys::CUdevice, String)> {
    let mut count = 0;
    // SAFETY: the driver is initialised.
    call("cuDeviceGetCount", unsafe {
        sys::cuDeviceGetCount(&mut count)
    })?;
    if i64::from(ordinal) >= i64::from(count) {
        let message = format!("there is no device cuda:{ordinal}, the driver has {count}");
        return Err(Error::Cuda {
            call: "cuDeviceGet",
            code: -1,
            message,
        });
    }
    let mut device = 0;
    let mut name = [0u8; 128];
    // SAFETY: the ordinal exists; the name is cut to the buffer and ends with a zero.
    unsafe {
        call("cuDeviceGet", sys::cuDeviceGet(&mut device, ordinal as i32))?;
        call(
            "cuDeviceGetName",
            sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device),
        )?;
    }
    let name = CStr::from_bytes_until_nul(&name)
        .map_or_else(|_| String::new(), |n| n.to_string_lossy().into());
    use sys::CUdevice_attribute as A;
    let capability = (
        attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    if capability != COMPUTE_CAPABILITY {
        let value = format!(
            "cuda:{ordinal} ({name}, compute capability {}.{})",
            capability.0, capability.1
        );
        return Err(Error::unsupported(
            "device",
            value,
            "the kernels are for compute capability 9.0 (Hopper)",
        ));
    }
    Ok((device, name))
}

fn attribute(device: sys::CUdevice, attribute: sys::CUdevice_attribute) -> Result<i32> {
    let mut value = 0;
    // SAFETY: the device is one of the driver's own.
    call("cuDeviceGetAttribute", unsafe {
        sys::cuDeviceGetAttribute(&mut value, attribute, device)
    })?;
    Ok(value)
}

/// What the memory's clock and width give, GB/s, two transfers a cycle: 4,814 of an H200, 3,352 of an H100 of 80 GB. 0 where the driver does
/// not say: only plans would be better for it.
fn memory(device: sys::CUdevice) -> i32 {
    use sys::CUdevice_attribute as A;
    let known = |of| attribute(device, of).map_or(0, i64::from);
    let khz = known(A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE);
    let bits = known(A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
    (khz * bits / 4_000_000).try_into().unwrap_or(0)
}

type Kernels = [Option<sys::CUkernel>; Kernel::COUNT];

/// Loads every image and readies every kernel: one that is loaded at its first launch cannot be launched first in a capture.
fn load(device: sys::CUdevice) -> Result<(Vec<Library>, Kernels)> {
    let mut kernels = [None; Kernel::COUNT];
    let mut libraries = Vec::new();
    for image in IMAGES {
        // SAFETY: a context is current; the image is a whole cubin.
        let library = unsafe { Library::load(image.cubin)? };
        for kernel in Kernel::all()
            .into_iter()
            .filter(|kernel| kernel.image() == image.name)
        {
            kernels[kernel.index()] = Some(ready(device, library.0, kernel)?);
        }
        libraries.push(library);
    }
    debug_assert!(
        Kernel::all()
            .iter()
            .all(|k| kernels[k.index()].is_some() == image(k.image()).is_some())
    );
    Ok((libraries, kernels))
}

/// A kernel of a library, ready to be launched in the current context.
fn ready(device: sys::CUdevice, library: sys::CUlibrary, kernel: Kernel) -> Result<sys::CUkernel> {
    use sys::CUfunction_attribute as A;
    let mut loaded = std::ptr::null_mut();
    // SAFETY: the library is loaded.
    let found = unsafe { sys::cuLibraryGetKernel(&mut loaded, library, kernel.name().as_ptr()) };
    call("cuLibraryGetKernel", found).map_err(|error| match error {
        Error::Cuda {
            call,
            code,
            message,
        } => {
            let (name, image) = (kernel.name().to_string_lossy(), kernel.image());
            Error::Cuda {
                call,
                code,
                message: format!("{message}: {name} in kernels/{image}.cu"),
            }
        }
        other => other,
    })?;
    let set = |attribute, value| {
        // SAFETY: the kernel is of the loaded library.
        call("cuKernelSetAttribute", unsafe {
            sys::cuKernelSetAttribute(attribute, value, loaded, device)
        })
    };
    let shared = kernel.shared_bytes();
    if shared > 0 {
        set(
            A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            shared as i32,
        )?;
    }
    if matches!(kernel, Kernel::Decode { .. }) {
        set(A::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)?;
    }
    let mut function = std::ptr::null_mut();
    // SAFETY: as above. Asking makes a driver that loads lazily load the kernel now.
    call("cuKernelGetFunction", unsafe {
        sys::cuKernelGetFunction(&mut function, loaded)
    })?;
    Ok(loaded)
}

/// How many clusters of 2, 4, 8 and 16 attention CTAs run at once: a cluster stays within one group of SMs, whose sizes
/// differ from chip to chip.
fn clusters(kernels: &Kernels) -> Result<[i32; 4]> {
    let attention = Kernel::all()
        .into_iter()
        .filter(|kernel| matches!(kernel, Kernel::Decode { .. }))
        .find_map(|kernel| Some((kernels[kernel.index()]?, kernel)));
    let Some((loaded, kernel)) = attention else {
        return Ok([0; 4]);
    };
    let mut clusters = [0; 4];
    for (count, cluster) in clusters.iter_mut().zip([2, 4, 8, MOST_CLUSTER]) {
        let launch = Launch {
            blocks: 1,
            team: cluster,
            threads: kernel.decode_threads(),
            cluster,
            ..Launch::default()
        };
        let mut attributes = launch.attributes();
        let config = launch.config(kernel, &mut attributes);
        // SAFETY: the kernel is loaded; the configuration is one it is launched with.
        call("cuOccupancyMaxActiveClusters", unsafe {
            sys::cuOccupancyMaxActiveClusters(count, loaded.cast(), &config)
        })?;
    }
    Ok(clusters)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sys::CUlaunchAttributeID as Id;

    #[test]
    fn a_teams_blocks_and_its_clusters_lie_along_y() {
        let kernel = Kernel::Plan(ferromla_schedule::PlannerKernel::Many);
        for (team, cluster, grid, along_y) in [(0, 0, (33, 1), 0), (4, 2, (33, 4), 2)] {
            let launch = Launch {
                blocks: 33,
                team,
                cluster,
                ..Launch::default()
            };
            let mut attributes = launch.attributes();
            // SAFETY: the second attribute is that of clusters.
            let dim = unsafe { attributes[1].value.clusterDim };
            let config = launch.config(kernel, &mut attributes);
            assert_eq!(
                (config.gridDimX, config.gridDimY, config.gridDimZ),
                (grid.0, grid.1, 1)
            );
            assert_eq!((dim.x, dim.y, dim.z), (1, along_y, 1));
        }
    }

    #[test]
    fn a_launch_may_begin_early_and_has_clusters_where_they_are_more_than_one_cta() {
        let early = Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        let clusters = Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        for (cluster, expected) in [(1, &[early][..]), (8, &[early, clusters])] {
            let launch = Launch {
                cluster,
                ..Launch::default()
            };
            let attributes = launch.attributes();
            let ids = attributes[..launch.used_attributes()].iter();
            assert!(
                ids.map(|attribute| attribute.id)
                    .eq(expected.iter().copied())
            );
        }
    }
}
