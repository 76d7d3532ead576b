//! The kernels by name: which image holds them and what they need set before their first launch.

use std::ffi::CStr;

use crate::dtype::{DType, KvFormat};
use crate::params::{
    FM_DECODE_SMEM_BYTES, FM_DECODE_THREADS, FM_DECODE_TOKENS_THREADS_16,
    FM_DECODE_TOKENS_THREADS_32,
};

use super::images::{IMAGES, image};

/// How decode brings the cache into shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loader {
    /// Whole pages of 16-bit numbers.
    Tma,
    /// Tokens of 16-bit numbers.
    Gather,
    /// Tokens of codes too.
    Codes,
    /// Tokens of codes with float32 scales too; rows of 576 only.
    Scaled,
}

impl Loader {
    pub const ALL: [Self; 4] = [Self::Tma, Self::Gather, Self::Codes, Self::Scaled];

    /// For tokens of caches of these formats.
    pub fn of_tokens(formats: &[KvFormat]) -> Self {
        if formats.contains(&KvFormat::Fp8V32) {
            Self::Scaled
        } else if formats.iter().any(|format| format.dtype().is_none()) {
            Self::Codes
        } else {
            Self::Gather
        }
    }
}

/// Query rows of a decode CTA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rows {
    Of64,
    Of32,
    Of16,
}

impl Rows {
    pub const ALL: [Self; 3] = [Self::Of64, Self::Of32, Self::Of16];

    /// As the choice of a plan has them.
    pub const fn of(rows: i32) -> Self {
        match rows {
            ..=16 => Self::Of16,
            17..=32 => Self::Of32,
            _ => Self::Of64,
        }
    }
}

/// The numbers that quantisation reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Numbers {
    Bf16,
    Fp16,
    F32,
}

impl Numbers {
    /// Of a type that checks have let through.
    pub const fn of(dtype: DType) -> Self {
        match dtype {
            DType::Fp16 => Self::Fp16,
            DType::F32 => Self::F32,
            _ => Self::Bf16,
        }
    }
}

/// The decode kernels in the order of their indices: rows, type, then the seven of width and loader.
#[rustfmt::skip]
const DECODE: [&CStr; 42] = [
    c"fm_decode_bf16_512_tma_64", c"fm_decode_bf16_512_gather_64", c"fm_decode_bf16_512_codes_64",
    c"fm_decode_bf16_576_tma_64", c"fm_decode_bf16_576_gather_64",
    c"fm_decode_bf16_576_codes_64", c"fm_decode_bf16_576_scaled_64",
    c"fm_decode_fp16_512_tma_64", c"fm_decode_fp16_512_gather_64", c"fm_decode_fp16_512_codes_64",
    c"fm_decode_fp16_576_tma_64", c"fm_decode_fp16_576_gather_64",
    c"fm_decode_fp16_576_codes_64", c"fm_decode_fp16_576_scaled_64",
    c"fm_decode_bf16_512_tma_32", c"fm_decode_bf16_512_gather_32", c"fm_decode_bf16_512_codes_32",
    c"fm_decode_bf16_576_tma_32", c"fm_decode_bf16_576_gather_32",
    c"fm_decode_bf16_576_codes_32", c"fm_decode_bf16_576_scaled_32",
    c"fm_decode_fp16_512_tma_32", c"fm_decode_fp16_512_gather_32", c"fm_decode_fp16_512_codes_32",
    c"fm_decode_fp16_576_tma_32", c"fm_decode_fp16_576_gather_32",
    c"fm_decode_fp16_576_codes_32", c"fm_decode_fp16_576_scaled_32",
    c"fm_decode_bf16_512_tma_16", c"fm_decode_bf16_512_gather_16", c"fm_decode_bf16_512_codes_16",
    c"fm_decode_bf16_576_tma_16", c"fm_decode_bf16_576_gather_16",
    c"fm_decode_bf16_576_codes_16", c"fm_decode_bf16_576_scaled_16",
    c"fm_decode_fp16_512_tma_16", c"fm_decode_fp16_512_gather_16", c"fm_decode_fp16_512_codes_16",
    c"fm_decode_fp16_576_tma_16", c"fm_decode_fp16_576_gather_16",
    c"fm_decode_fp16_576_codes_16", c"fm_decode_fp16_576_scaled_16",
];

/// Every entry point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kernel {
    Plan,
    Decode {
        fp16: bool,
        rope: bool,
        loader: Loader,
        rows: Rows,
    },
    Merge {
        fp16: bool,
    },
    Append,
    Offsets,
    Gather,
    Quantise {
        from: Numbers,
    },
    Dequantise {
        f32: bool,
    },
    ToPhysical,
    WindowOffsets,
    WindowIds,
    CombineTopkWindow,
}

/// Kernels that are not decode kernels.
const OTHERS: usize = 15;
/// The loaders of rows of 512 and of 576, the first of [`Loader::ALL`].
const LOADERS: [usize; 2] = [3, 4];

impl Kernel {
    pub const COUNT: usize = OTHERS + DECODE.len();

    pub fn all() -> Vec<Self> {
        let mut all = vec![
            Self::Plan,
            Self::Append,
            Self::Offsets,
            Self::Gather,
            Self::Merge { fp16: false },
            Self::Merge { fp16: true },
            Self::Quantise {
                from: Numbers::Bf16,
            },
            Self::Quantise {
                from: Numbers::Fp16,
            },
            Self::Quantise { from: Numbers::F32 },
            Self::Dequantise { f32: false },
            Self::Dequantise { f32: true },
            Self::ToPhysical,
            Self::WindowOffsets,
            Self::WindowIds,
            Self::CombineTopkWindow,
        ];
        for rows in Rows::ALL {
            for fp16 in [false, true] {
                for rope in [false, true] {
                    for &loader in &Loader::ALL[..LOADERS[rope as usize]] {
                        all.push(Self::Decode {
                            fp16,
                            rope,
                            loader,
                            rows,
                        });
                    }
                }
            }
        }
        all
    }

    /// Position in [`Kernel::all`].
    pub fn index(self) -> usize {
        match self {
            Self::Plan => 0,
            Self::Append => 1,
            Self::Offsets => 2,
            Self::Gather => 3,
            Self::Merge { fp16 } => 4 + usize::from(fp16),
            Self::Quantise { from } => 6 + from as usize,
            Self::Dequantise { f32 } => 9 + usize::from(f32),
            Self::ToPhysical => 11,
            Self::WindowOffsets => 12,
            Self::WindowIds => 13,
            Self::CombineTopkWindow => 14,
            Self::Decode { .. } => OTHERS + self.decode_index(),
        }
    }

    /// Position in [`DECODE`].
    const fn decode_index(self) -> usize {
        match self {
            Self::Decode {
                fp16,
                rope,
                loader,
                rows,
            } => {
                let of_type = 2 * rows as usize + fp16 as usize;
                let of_width = if rope { LOADERS[0] } else { 0 };
                of_type * (LOADERS[0] + LOADERS[1]) + of_width + loader as usize
            }
            _ => 0,
        }
    }

    /// The file in `kernels/`.
    pub const fn image(self) -> &'static str {
        match self {
            Self::Plan => "plan",
            Self::Decode { fp16, loader, .. } => match (loader, fp16) {
                (Loader::Tma | Loader::Gather, false) => "decode_bf16",
                (Loader::Tma | Loader::Gather, true) => "decode_fp16",
                (Loader::Codes | Loader::Scaled, false) => "decode_codes_bf16",
                (Loader::Codes | Loader::Scaled, true) => "decode_codes_fp16",
            },
            Self::Merge { .. } => "merge",
            Self::Append | Self::Offsets | Self::Gather => "cache",
            Self::Quantise { .. } => "quantise",
            Self::Dequantise { .. } => "dequantise",
            Self::ToPhysical | Self::WindowOffsets | Self::WindowIds | Self::CombineTopkWindow => {
                "indices"
            }
        }
    }

    /// The entry point.
    pub const fn name(self) -> &'static CStr {
        match self {
            Self::Plan => c"fm_plan",
            Self::Append => c"fm_append",
            Self::Offsets => c"fm_offsets",
            Self::Gather => c"fm_gather",
            Self::Merge { fp16: false } => c"fm_merge_bf16",
            Self::Merge { fp16: true } => c"fm_merge_fp16",
            Self::Quantise { from } => {
                [c"fm_quantise_bf16", c"fm_quantise_fp16", c"fm_quantise_f32"][from as usize]
            }
            Self::Dequantise { f32: false } => c"fm_dequantise_bf16",
            Self::Dequantise { f32: true } => c"fm_dequantise_f32",
            Self::ToPhysical => c"fm_to_physical",
            Self::WindowOffsets => c"fm_window_offsets",
            Self::WindowIds => c"fm_window_ids",
            Self::CombineTopkWindow => c"fm_combine_topk_window",
            Self::Decode { .. } => DECODE[self.decode_index()],
        }
    }

    /// Threads of a decode CTA.
    pub const fn decode_threads(self) -> u32 {
        match self {
            Self::Decode {
                loader: Loader::Gather | Loader::Codes | Loader::Scaled,
                rows: Rows::Of32,
                ..
            } => FM_DECODE_TOKENS_THREADS_32 as u32,
            Self::Decode {
                loader: Loader::Gather | Loader::Codes | Loader::Scaled,
                rows: Rows::Of16,
                ..
            } => FM_DECODE_TOKENS_THREADS_16 as u32,
            _ => FM_DECODE_THREADS as u32,
        }
    }

    /// Dynamic shared memory in bytes.
    pub const fn shared_bytes(self) -> u32 {
        match self {
            Self::Decode { .. } => FM_DECODE_SMEM_BYTES as u32,
            _ => 0,
        }
    }
}

pub(super) fn is_fp16(dtype: DType) -> bool {
    dtype == DType::Fp16
}

/// The names of the kernels whose images this build has.
pub(crate) fn compiled_kernels() -> Vec<&'static str> {
    if IMAGES.is_empty() {
        return Vec::new();
    }
    let compiled = Kernel::all()
        .into_iter()
        .filter(|kernel| image(kernel.image()).is_some());
    compiled
        .filter_map(|kernel| kernel.name().to_str().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_index_of_a_kernel_is_its_place() {
        for (place, kernel) in Kernel::all().into_iter().enumerate() {
            assert_eq!(kernel.index(), place, "{kernel:?}");
        }
    }

    #[test]
    fn every_kernel_has_its_own_name() {
        let names: std::collections::HashSet<_> =
            Kernel::all().into_iter().map(Kernel::name).collect();
        assert_eq!(names.len(), Kernel::COUNT);
    }

    #[test]
    fn a_decode_kernel_has_the_name_of_what_it_is() {
        for kernel in Kernel::all() {
            let Kernel::Decode {
                fp16,
                rope,
                loader,
                rows,
            } = kernel
            else {
                continue;
            };
            let dtype = if fp16 { "fp16" } else { "bf16" };
            let width = if rope { 576 } else { 512 };
            let loader = format!("{loader:?}").to_lowercase();
            let rows = format!("{rows:?}");
            let rows = rows.trim_start_matches("Of");
            let name = format!("fm_decode_{dtype}_{width}_{loader}_{rows}");
            assert_eq!(kernel.name().to_str(), Ok(name.as_str()));
        }
    }

    #[test]
    fn the_loader_can_read_every_cache() {
        use KvFormat::{Bf16, Fp4V41, Fp8, Fp8V4, Fp8V32};
        for (formats, loader) in [
            (&[Bf16, Bf16][..], Loader::Gather),
            (&[Fp8], Loader::Codes),
            (&[Bf16, Fp4V41], Loader::Codes),
            (&[Fp8V4, Fp4V41], Loader::Codes),
            (&[Bf16, Fp8V32], Loader::Scaled),
            (&[Fp8V32], Loader::Scaled),
        ] {
            assert_eq!(Loader::of_tokens(formats), loader, "{formats:?}");
        }
    }
}
