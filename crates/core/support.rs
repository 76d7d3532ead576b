//! `support`: what runs on a device, as data.

use crate::cuda;
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
    /// The kernels compiled into this build, whatever the device.
    pub kernels: Vec<&'static str>,
    /// Why the backend is `"none"`.
    pub reason: Option<String>,
    /// What is supported; empty when the backend is `"none"`.
    pub rows: Vec<SupportRow>,
}

/// What the driver says of a device whose kernels are loaded.
#[derive(Debug)]
pub(crate) struct CudaSupport {
    pub device_name: String,
}

/// What is supported on this device. Never fails: a device that cannot be used says why.
///
/// ```
/// let support = ferromla::support(ferromla::Device::Cpu);
/// assert_eq!(support.backend, "cpu");
/// assert!(support.rows.iter().any(|row| row.operation == "decode"));
/// ```
pub fn support(device: Device) -> Support {
    let kernels = cuda::compiled_kernels();
    let nothing = Support {
        device,
        backend: "none",
        device_name: None,
        kernels,
        reason: None,
        rows: Vec::new(),
    };
    match device {
        Device::Cpu => Support {
            backend: "cpu",
            rows: rows(&KvFormat::SUPPORTED, "cpu"),
            ..nothing
        },
        Device::Cuda(ordinal) => match cuda::support(ordinal) {
            Err(error) => Support {
                reason: Some(error.to_string()),
                ..nothing
            },
            Ok(CudaSupport { device_name }) => {
                let formats: &[_] = if cfg!(feature = "fp16") {
                    &KvFormat::SUPPORTED
                } else {
                    &[KvFormat::Bf16]
                };
                Support {
                    backend: "cuda",
                    device_name: Some(device_name),
                    rows: rows(formats, "cuda"),
                    ..nothing
                }
            }
        },
    }
}

fn rows(formats: &[KvFormat], backend: &str) -> Vec<SupportRow> {
    const D_QK: &[i64] = &[576, 512];
    let mut rows = Vec::new();
    for &format in formats {
        let dtype = format.dtype().unwrap_or(DType::Bf16);
        let row = |operation, kv_heads| SupportRow {
            operation,
            kv_format: Some(format),
            dtype,
            d_qk: D_QK,
            heads: "any",
            kv_heads,
            page_sizes: "any",
        };
        for attention in ["decode", "prefill"] {
            rows.push(row(attention, "any that divide the heads"));
        }
        for attention in ["sparse_decode", "sparse_prefill"] {
            if backend == "cpu" {
                rows.push(row(attention, "1"));
            }
        }
        rows.push(row("append_kv", "1"));
        rows.push(SupportRow {
            dtype: DType::Bf16,
            ..row("gather_kv", "1")
        });
        rows.push(SupportRow {
            kv_format: None,
            d_qk: &[],
            page_sizes: "none",
            ..row("merge_states", "none")
        });
    }
    rows
}
