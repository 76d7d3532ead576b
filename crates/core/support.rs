//! `support`: what runs on a device, as data.

use crate::dtype::{DType, Device, KvFormat};

/// One supported combination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SupportRow {
    /// The operation's name.
    pub operation: &'static str,
    /// The cache format; `None` for operations without a cache.
    pub kv_format: Option<KvFormat>,
    /// Of queries and outputs.
    pub dtype: DType,
    /// Row widths.
    pub d_qk: &'static [i64],
    /// Query heads, in words.
    pub heads: &'static str,
    /// Cached heads, in words.
    pub kv_heads: &'static str,
    /// Page sizes, in words.
    pub page_sizes: &'static str,
}

/// What [`support`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Support {
    /// The device asked about.
    pub device: Device,
    /// `"cpu"`, `"cuda"`, or `"none"` when nothing runs there.
    pub backend: &'static str,
    /// The device's own name, where the driver tells it.
    pub device_name: Option<String>,
    /// The kernels compiled into this build.
    pub kernels: Vec<&'static str>,
    /// Why the backend is `"none"`.
    pub reason: Option<String>,
    /// What is supported; empty when the backend is `"none"`.
    pub rows: Vec<SupportRow>,
}

/// What is supported on this device. Never fails: a device that cannot be used says why.
///
/// ```
/// let support = ferromla::support(ferromla::Device::Cpu);
/// assert_eq!(support.backend, "cpu");
/// ```
pub fn support(device: Device) -> Support {
    let backend = if device == Device::Cpu { "cpu" } else { "none" };
    Support {
        device,
        backend,
        device_name: None,
        kernels: Vec::new(),
        reason: None,
        rows: Vec::new(),
    }
}
