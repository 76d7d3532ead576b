//! The compiled kernels that the build script embeds.

/// One cubin, aligned as the driver reads it.
#[allow(dead_code)] // a build without nvcc has no image
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

/// A compiled `kernels/NAME.cu`.
pub(super) struct Image {
    pub name: &'static str,
    pub cubin: &'static [u8],
}

// `IMAGES: &[Image]`, `WITHOUT_KERNELS: Option<&str>`, why there are none, and `RELEASE: (i32, i32)`, nvcc's: drivers of
// its major version, and later ones, read them.
include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// The image of this name.
pub(super) fn image(name: &str) -> Option<&'static Image> {
    IMAGES.iter().find(|image| image.name == name)
}
