//! The kernels by name: which image holds them and what they need set before their first launch.

use std::ffi::CStr;

use crate::dtype::DType;
use crate::params::{
    FM_DECODE_GATHER_THREADS_16, FM_DECODE_GATHER_THREADS_32, FM_DECODE_SMEM_BYTES,
    FM_DECODE_THREADS,
};

use super::images::{IMAGES, image};

/// How decode brings the cache into shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loader {
    Tma,
    Gather,
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

/// The decode kernels in the order of their indices: rows, type, rope part or none, loader.
#[rustfmt::skip]
const DECODE: [&CStr; 24] = [
    c"fm_decode_bf16_512_tma_64", c"fm_decode_bf16_512_gather_64",
    c"fm_decode_bf16_576_tma_64", c"fm_decode_bf16_576_gather_64",
    c"fm_decode_fp16_512_tma_64", c"fm_decode_fp16_512_gather_64",
    c"fm_decode_fp16_576_tma_64", c"fm_decode_fp16_576_gather_64",
    c"fm_decode_bf16_512_tma_32", c"fm_decode_bf16_512_gather_32",
    c"fm_decode_bf16_576_tma_32", c"fm_decode_bf16_576_gather_32",
    c"fm_decode_fp16_512_tma_32", c"fm_decode_fp16_512_gather_32",
    c"fm_decode_fp16_576_tma_32", c"fm_decode_fp16_576_gather_32",
    c"fm_decode_bf16_512_tma_16", c"fm_decode_bf16_512_gather_16",
    c"fm_decode_bf16_576_tma_16", c"fm_decode_bf16_576_gather_16",
    c"fm_decode_fp16_512_tma_16", c"fm_decode_fp16_512_gather_16",
    c"fm_decode_fp16_576_tma_16", c"fm_decode_fp16_576_gather_16",
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
    Combine {
        fp16: bool,
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
const OTHERS: usize = 17;

impl Kernel {
    pub const COUNT: usize = OTHERS + DECODE.len();

    pub fn all() -> Vec<Self> {
        let mut all = vec![
            Self::Plan,
            Self::Append,
            Self::Offsets,
            Self::Gather,
            Self::Combine { fp16: false },
            Self::Combine { fp16: true },
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
                    for loader in [Loader::Tma, Loader::Gather] {
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
            Self::Combine { fp16 } => 4 + usize::from(fp16),
            Self::Merge { fp16 } => 6 + usize::from(fp16),
            Self::Quantise { from } => 8 + from as usize,
            Self::Dequantise { f32 } => 11 + usize::from(f32),
            Self::ToPhysical => 13,
            Self::WindowOffsets => 14,
            Self::WindowIds => 15,
            Self::CombineTopkWindow => 16,
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
            } => 8 * rows as usize + 4 * fp16 as usize + 2 * rope as usize + loader as usize,
            _ => 0,
        }
    }

    /// The file in `kernels/`.
    pub const fn image(self) -> &'static str {
        match self {
            Self::Plan => "plan",
            Self::Decode { fp16: false, .. } => "decode_bf16",
            Self::Decode { fp16: true, .. } => "decode_fp16",
            Self::Combine { .. } => "combine",
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
            Self::Combine { fp16: false } => c"fm_combine_bf16",
            Self::Combine { fp16: true } => c"fm_combine_fp16",
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
                loader: Loader::Gather,
                rows: Rows::Of32,
                ..
            } => FM_DECODE_GATHER_THREADS_32 as u32,
            Self::Decode {
                loader: Loader::Gather,
                rows: Rows::Of16,
                ..
            } => FM_DECODE_GATHER_THREADS_16 as u32,
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
}
