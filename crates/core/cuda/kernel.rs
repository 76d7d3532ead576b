//! The kernels by name: which image holds them and what they need set before their first launch.

use ferromla_schedule::PlannerKernel;
use ferromla_schedule::plan_layout::FM_PLAN_CLUSTER_SMEM_BYTES;
use std::ffi::CStr;

use crate::dtype::DType;
use crate::params::{FM_DECODE_SMEM_BYTES, FM_DECODE_THREADS};

use super::images::{IMAGES, RELEASE, image};
use super::variant::{Variant, Walk};

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

/// The names of a decode kernel for each [`Walk`].
macro_rules! decode_names {
    ($($name:literal)*) => {
        [$([
            decode_names!(@ $name, ""),
            decode_names!(@ $name, "_by_2"),
            decode_names!(@ $name, "_by_4"),
            decode_names!(@ $name, "_by_8"),
            decode_names!(@ $name, "_by_16"),
            decode_names!(@ $name, "_steps"),
        ]),*]
    };
    (@ $name:literal, $walk:literal) => {
        match CStr::from_bytes_with_nul(concat!("fm_decode_", $name, $walk, "\0").as_bytes()) {
            Ok(name) => name,
            Err(_) => panic!("ends with zero"),
        }
    };
}

/// The decode kernels in the order of their indices: type, width, variant.
#[rustfmt::skip]
const DECODE: [[&CStr; Walk::ALL.len()]; 59] = decode_names![
    "bf16_512_tma_64" "bf16_512_gather_64" "bf16_512_raw_64" "bf16_512_bare_64"
    "bf16_512_tma_32" "bf16_512_gather_32" "bf16_512_raw_32" "bf16_512_bare_32"
    "bf16_512_tma_16" "bf16_512_gather_16" "bf16_512_raw_16" "bf16_512_bare_16"
    "bf16_512_codes_64" "bf16_512_codes_16"
    "bf16_512_fine_64" "bf16_512_fine_32" "bf16_512_fine_16"
    "bf16_512_staged_64" "bf16_512_finestaged_64" "bf16_512_pairs_64" "bf16_512_finepairs_64"
    "bf16_576_tma_64" "bf16_576_gather_64" "bf16_576_raw_64" "bf16_576_bare_64"
    "bf16_576_tma_32" "bf16_576_gather_32" "bf16_576_raw_32" "bf16_576_bare_32"
    "bf16_576_tma_16" "bf16_576_gather_16" "bf16_576_raw_16" "bf16_576_bare_16"
    "bf16_576_codes_64" "bf16_576_codes_16"
    "fp16_512_tma_64" "fp16_512_gather_64" "fp16_512_raw_64" "fp16_512_bare_64"
    "fp16_512_tma_32" "fp16_512_gather_32" "fp16_512_raw_32" "fp16_512_bare_32"
    "fp16_512_tma_16" "fp16_512_gather_16" "fp16_512_raw_16" "fp16_512_bare_16"
    "fp16_576_tma_64" "fp16_576_gather_64" "fp16_576_raw_64" "fp16_576_bare_64"
    "fp16_576_tma_32" "fp16_576_gather_32" "fp16_576_raw_32" "fp16_576_bare_32"
    "fp16_576_tma_16" "fp16_576_gather_16" "fp16_576_raw_16" "fp16_576_bare_16"
];

/// Every entry point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kernel {
    Plan(PlannerKernel),
    Decode {
        fp16: bool,
        rope: bool,
        variant: Variant,
        walk: Walk,
    },
    Merge {
        fp16: bool,
    },
    Fill,
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
const OTHERS: usize = 20;

impl Kernel {
    /// One more than the highest index.
    pub const COUNT: usize = OTHERS + DECODE.len() * Walk::ALL.len();

    pub fn all() -> Vec<Self> {
        let mut all = vec![
            Self::Plan(PlannerKernel::Many),
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
            Self::Plan(PlannerKernel::Cluster),
            Self::Plan(PlannerKernel::Few),
            Self::Plan(PlannerKernel::OnePart),
            Self::Fill,
            Self::Plan(PlannerKernel::ByCount),
        ];
        for fp16 in [false, true] {
            for rope in [false, true] {
                for variant in &Variant::ALL[..Variant::count(fp16, rope)] {
                    let walks = Walk::ALL.into_iter().filter(|&walk| variant.has(walk));
                    all.extend(walks.map(|walk| Self::Decode {
                        fp16,
                        rope,
                        variant: *variant,
                        walk,
                    }));
                }
            }
        }
        all
    }

    /// A number of its own.
    pub fn index(self) -> usize {
        match self {
            Self::Plan(PlannerKernel::Many) => 0,
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
            Self::Plan(PlannerKernel::Cluster) => 15,
            Self::Plan(PlannerKernel::Few) => 16,
            Self::Plan(PlannerKernel::OnePart) => 17,
            Self::Fill => 18,
            Self::Plan(PlannerKernel::ByCount) => 19,
            Self::Decode { walk, .. } => {
                OTHERS + self.decode_index() * Walk::ALL.len() + walk as usize
            }
        }
    }

    /// Position in [`DECODE`].
    const fn decode_index(self) -> usize {
        match self {
            Self::Decode {
                fp16,
                rope,
                variant,
                ..
            } => {
                let of_bf16 = Variant::count(false, false) + Variant::count(false, true);
                let narrow = if rope { Variant::count(fp16, false) } else { 0 };
                let before = if fp16 { of_bf16 + narrow } else { narrow };
                before + variant as usize
            }
            _ => 0,
        }
    }

    /// The file in `kernels/`.
    pub const fn image(self) -> &'static str {
        match self {
            Self::Plan(_) => "plan",
            Self::Decode {
                fp16,
                walk: Walk::Steps,
                ..
            } => {
                if fp16 {
                    "decode_steps_fp16"
                } else {
                    "decode_steps_bf16"
                }
            }
            Self::Decode { fp16, variant, .. } => match (variant, fp16) {
                (variant, _) if variant.is_staged() => "decode_staged_bf16",
                (Variant::Codes64 | Variant::Codes16, _) => "decode_codes_bf16",
                (Variant::Fine64 | Variant::Fine32 | Variant::Fine16, _) => "decode_fine_bf16",
                (Variant::Raw64 | Variant::Raw32 | Variant::Raw16, false) => "decode_raw_bf16",
                (Variant::Raw64 | Variant::Raw32 | Variant::Raw16, true) => "decode_raw_fp16",
                (Variant::Bare64 | Variant::Bare32 | Variant::Bare16, false) => "decode_bare_bf16",
                (Variant::Bare64 | Variant::Bare32 | Variant::Bare16, true) => "decode_bare_fp16",
                (_, false) => "decode_bf16",
                (_, true) => "decode_fp16",
            },
            Self::Merge { .. } => "merge",
            Self::Fill => "fill",
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
            Self::Plan(PlannerKernel::Many) => c"fm_plan",
            Self::Plan(PlannerKernel::Cluster) => c"fm_plan_cluster",
            Self::Plan(PlannerKernel::Few) => c"fm_plan_few",
            Self::Plan(PlannerKernel::OnePart) => c"fm_plan_one_part",
            Self::Plan(PlannerKernel::ByCount) => c"fm_plan_by_count",
            Self::Fill => c"fm_fill",
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
            Self::Decode { walk, .. } => DECODE[self.decode_index()][walk as usize],
        }
    }

    /// What scores lose on average, as a share of them. Tensor cores cut sums toward zero, and a score of 16-bit numbers is
    /// one sum of all products.
    pub const fn lost_of_scores(self) -> f32 {
        match self {
            Self::Decode { fp16, variant, .. } if variant.multiplies_numbers_of_16_bits() => {
                if fp16 { 9e-7 } else { 5e-7 }
            }
            _ => 0.0,
        }
    }

    /// Threads of a decode CTA.
    pub const fn decode_threads(self) -> u32 {
        match self {
            Self::Decode { variant, rope, .. } => variant.threads(rope) as u32,
            _ => FM_DECODE_THREADS as u32,
        }
    }

    /// Dynamic shared memory in bytes.
    pub const fn shared_bytes(self) -> u32 {
        match self {
            Self::Decode { .. } => FM_DECODE_SMEM_BYTES as u32,
            Self::Plan(PlannerKernel::Cluster) => FM_PLAN_CLUSTER_SMEM_BYTES as u32,
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

/// What compiled them; none where there are none.
pub(crate) fn compiler() -> Option<String> {
    let (major, minor) = RELEASE;
    (!IMAGES.is_empty()).then(|| format!("nvcc {major}.{minor}"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_kernel_has_its_own_index_and_name() {
        let all = Kernel::all();
        let distinct = |count: usize| assert_eq!(count, all.len());
        distinct(all.iter().map(|k| k.name()).collect::<HashSet<_>>().len());
        distinct(all.iter().map(|k| k.index()).collect::<HashSet<_>>().len());
        assert!(all.iter().all(|kernel| kernel.index() < Kernel::COUNT));
    }

    #[test]
    fn a_decode_kernel_has_the_name_of_what_it_is() {
        for kernel in Kernel::all() {
            let Kernel::Decode {
                fp16,
                rope,
                variant,
                walk,
            } = kernel
            else {
                continue;
            };
            let dtype = if fp16 { "fp16" } else { "bf16" };
            let width = if rope { 576 } else { 512 };
            let variant = format!("{variant:?}").to_lowercase();
            let (loader, rows) = variant.split_at(variant.len() - 2);
            let walk = match walk {
                Walk::Single => String::new(),
                Walk::Steps => "_steps".to_owned(),
                by => format!("_by_{}", 1 << by as usize),
            };
            let name = format!("fm_decode_{dtype}_{width}_{loader}_{rows}{walk}");
            assert_eq!(kernel.name().to_str(), Ok(name.as_str()));
        }
    }

    #[test]
    fn ctas_have_the_threads_of_their_roles() {
        let threads = |rope| {
            Variant::ALL.map(|variant| {
                let kernel = Kernel::Decode {
                    fp16: false,
                    rope,
                    variant,
                    walk: Walk::Single,
                };
                kernel.decode_threads()
            })
        };
        let of_576 = [
            512, 512, 384, 384, 512, 512, 384, 384, 512, 512, 384, 384, 512, 640, 384, 512, 512,
            512, 512, 512, 512,
        ];
        let mut of_512 = of_576;
        for few in [Variant::Raw32, Variant::Raw16] {
            let at = Variant::ALL.iter().position(|&variant| variant == few);
            of_512[at.unwrap()] = 512;
        }
        assert_eq!([threads(true), threads(false)], [of_576, of_512]);
    }

    #[test]
    fn scores_that_are_one_sum_of_16_bit_products_get_back_what_they_lose() {
        for kernel in Kernel::all() {
            let lost = match kernel {
                Kernel::Decode {
                    fp16,
                    variant:
                        Variant::Tma64
                        | Variant::Gather64
                        | Variant::Tma32
                        | Variant::Gather32
                        | Variant::Tma16
                        | Variant::Gather16
                        | Variant::Staged64
                        | Variant::FineStaged64
                        | Variant::Pairs64
                        | Variant::FinePairs64,
                    ..
                } => [5e-7, 9e-7][usize::from(fp16)],
                _ => 0.0,
            };
            assert_eq!(kernel.lost_of_scores(), lost, "{kernel:?}");
        }
    }
}
