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
    /// The formats that an extra cache beside it can have; none where there is no extra cache.
    pub extra_kv_formats: Vec<KvFormat>,
    /// Of queries, of the rows that are written to a cache, of those that come out of it, or of indices.
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
    /// What compiled them, `"nvcc 13.3"`: drivers of its major version, and later ones, read them.
    pub compiler: Option<String>,
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
    let nothing = Support {
        device,
        backend: "none",
        device_name: None,
        kernels: cuda::compiled_kernels(),
        compiler: cuda::compiler(),
        reason: None,
        rows: Vec::new(),
    };
    match device {
        Device::Cpu => Support {
            backend: "cpu",
            rows: rows(true),
            ..nothing
        },
        Device::Cuda(ordinal) => match cuda::support(ordinal) {
            Err(error) => Support {
                reason: Some(error.to_string()),
                ..nothing
            },
            Ok(CudaSupport { device_name }) => Support {
                backend: "cuda",
                device_name: Some(device_name),
                rows: rows(cfg!(feature = "fp16")),
                ..nothing
            },
        },
    }
}

/// `fp16`: whether caches and queries can be of this type.
fn rows(fp16: bool) -> Vec<SupportRow> {
    let mut rows = Vec::new();
    let mut formats = KvFormat::ALL.to_vec();
    formats.retain(|&format| fp16 || format != KvFormat::Fp16);
    for format in formats {
        let quantised = format.is_quantised();
        let row = |operation, dtype| SupportRow {
            operation,
            kv_format: Some(format),
            extra_kv_formats: Vec::new(),
            dtype,
            d_qk: format.d_qk(),
            heads: "any",
            kv_heads: "1",
            page_sizes: "any",
        };
        let new_rows: &[DType] = match format.dtype() {
            Some(DType::Fp16) => &[DType::Fp16],
            Some(_) => &[DType::Bf16],
            None => &[DType::Bf16, DType::Fp16, DType::F32],
        };
        if KvFormat::DENSE.contains(&format) {
            let queries: &[DType] = match format {
                KvFormat::Fp8 => &[DType::Bf16, DType::Fp16, DType::F8E4M3],
                _ => &new_rows[..new_rows.len().min(2)],
            };
            let kv_heads = if quantised {
                "1"
            } else {
                "any that divide the heads"
            };
            let queries = queries
                .iter()
                .filter(|&&dtype| fp16 || dtype != DType::Fp16);
            for operation in ["decode", "prefill"] {
                rows.extend(queries.clone().map(|&dtype| SupportRow {
                    kv_heads,
                    ..row(operation, dtype)
                }));
            }
        }
        if KvFormat::SPARSE.contains(&format) {
            rows.push(SupportRow {
                extra_kv_formats: beside(format, new_rows[0]),
                ..row("sparse_decode", new_rows[0])
            });
            rows.push(row("sparse_prefill", new_rows[0]));
        }
        rows.extend(new_rows.iter().map(|&dtype| row("append_kv", dtype)));
        if quantised {
            rows.extend(new_rows.iter().map(|&dtype| row("quantize_kv", dtype)));
            let out = [DType::Bf16, DType::F32];
            rows.extend(out.map(|dtype| row("dequantize_kv", dtype)));
        }
        rows.push(row("gather_kv", DType::Bf16));
        if !quantised {
            rows.push(SupportRow {
                kv_format: None,
                d_qk: &[],
                page_sizes: "none",
                kv_heads: "none",
                ..row("merge_states", new_rows[0])
            });
        }
    }
    let of_indices = |operation| SupportRow {
        operation,
        kv_format: None,
        extra_kv_formats: Vec::new(),
        dtype: DType::I32,
        d_qk: &[],
        heads: "none",
        kv_heads: "none",
        page_sizes: "any",
    };
    rows.push(of_indices("to_physical"));
    rows.push(of_indices("window_token_ids"));
    rows.push(SupportRow {
        page_sizes: "none",
        ..of_indices("combine_topk_window")
    });
    rows
}

/// The formats of an extra cache: of rows as long, for queries of this type.
fn beside(format: KvFormat, query: DType) -> Vec<KvFormat> {
    let fits = |extra: &KvFormat| {
        let as_long = extra.d_qk().iter().any(|dim| format.d_qk().contains(dim));
        as_long && extra.dtype().unwrap_or(DType::Bf16) == query
    };
    KvFormat::ALL.into_iter().filter(fits).collect()
}
