//! The kernels by name: which image holds them and what they need set before their first launch.

use ferromla_schedule::PlannerKernel;
use std::ffi::CStr;

use crate::dtype::{DType, KvFormat, Operands};
use crate::params::{
    FM_DECODE_SMEM_BYTES, FM_DECODE_THREADS, FM_DECODE_THREADS_2_LOADERS, FM_DECODE_THREADS_RAW,
};

use super::images::{IMAGES, image};

/// How decode brings the cache into shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loader {
    /// Whole pages of 16-bit numbers.
    Tma,
    /// Tokens of 16-bit numbers.
    Gather,
    /// Rows of e4m3 codes, as they lie in the cache.
    Raw,
    /// The same of codes that have no scales.
    Bare,
    /// Rows of e4m3 codes beside rows of e2m1 codes, which become such.
    Fine,
    /// Tokens of any cache, turned to half as they come.
    Codes,
    /// Listed rows of e4m3 codes, turned to bfloat16.
    Staged,
    /// The same where some are e2m1 codes.
    FineStaged,
    /// Listed rows of e4m3 codes, turned to bfloat16, half of them by each of two CTAs.
    Pairs,
    /// The same where some are e2m1 codes.
    FinePairs,
}

/// The CTAs that lists are shared out to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ctas {
    /// Query rows of each.
    pub rows: i32,
    /// How many have the same lists.
    pub team: i32,
    /// Whether codes are better staged where there is a choice.
    pub stages_codes: bool,
}

impl Loader {
    /// For lists of caches of these formats. What CTAs of 64 rows turn to bfloat16 takes bf16 queries of 512 columns, `narrow` ones.
    pub fn of_lists(formats: &[KvFormat], ctas: Ctas, dtype: DType, narrow: bool) -> Self {
        let single = Self::of_tokens(formats);
        let codes = formats.iter().all(|format| format.is_quantised());
        if ctas.rows != 64 || dtype != DType::Bf16 || !narrow || !codes {
            return single;
        }
        match (single, ctas.team % 2 == 0) {
            (Self::Raw, true) => Self::Pairs,
            (Self::Raw, false) if ctas.stages_codes => Self::Staged,
            (Self::Fine | Self::Codes, true) => Self::FinePairs,
            (Self::Codes, false) => Self::FineStaged,
            _ => single,
        }
    }

    /// For tokens of caches of these formats.
    pub fn of_tokens(formats: &[KvFormat]) -> Self {
        match KvFormat::operands(formats) {
            Operands::Halves => Self::Gather,
            Operands::Codes => Self::Raw,
            Operands::BareCodes => Self::Bare,
            Operands::FineCodes => Self::Fine,
            Operands::Converted => Self::Codes,
        }
    }
}

/// The decode kernels of a type and width: loader and query rows of a CTA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Variant {
    Tma64,
    Gather64,
    Raw64,
    Bare64,
    Tma32,
    Gather32,
    Raw32,
    Bare32,
    Tma16,
    Gather16,
    Raw16,
    Bare16,
    Codes64,
    Codes16,
    Fine64,
    Fine32,
    Fine16,
    Staged64,
    FineStaged64,
    Pairs64,
    FinePairs64,
}

impl Variant {
    /// Those of fp16 queries first: a quantised cache beside one of another kind takes bf16 ones. Last those of rows of 512
    /// columns alone.
    pub const ALL: [Self; 21] = [
        Self::Tma64,
        Self::Gather64,
        Self::Raw64,
        Self::Bare64,
        Self::Tma32,
        Self::Gather32,
        Self::Raw32,
        Self::Bare32,
        Self::Tma16,
        Self::Gather16,
        Self::Raw16,
        Self::Bare16,
        Self::Codes64,
        Self::Codes16,
        Self::Fine64,
        Self::Fine32,
        Self::Fine16,
        Self::Staged64,
        Self::FineStaged64,
        Self::Pairs64,
        Self::FinePairs64,
    ];

    /// How many have kernels of a type of queries, and of a width.
    const fn count(fp16: bool, rope: bool) -> usize {
        match (fp16, rope) {
            (true, _) => 12,
            (false, true) => 14,
            (false, false) => Self::ALL.len(),
        }
    }

    /// For the rows that the choice of a plan has. Of caches of which any may be of any kind there is no kernel of 32 rows.
    pub const fn of(loader: Loader, rows: i32) -> Option<Self> {
        Some(match (loader, rows) {
            (Loader::Tma, 64) => Self::Tma64,
            (Loader::Gather, 64) => Self::Gather64,
            (Loader::Raw, 64) => Self::Raw64,
            (Loader::Bare, 64) => Self::Bare64,
            (Loader::Fine, 64) => Self::Fine64,
            (Loader::Codes, 64) => Self::Codes64,
            (Loader::Staged, 64) => Self::Staged64,
            (Loader::FineStaged, 64) => Self::FineStaged64,
            (Loader::Pairs, 64) => Self::Pairs64,
            (Loader::FinePairs, 64) => Self::FinePairs64,
            (Loader::Tma, 32) => Self::Tma32,
            (Loader::Gather, 32) => Self::Gather32,
            (Loader::Raw, 32) => Self::Raw32,
            (Loader::Bare, 32) => Self::Bare32,
            (Loader::Fine, 32) => Self::Fine32,
            (Loader::Tma, 16) => Self::Tma16,
            (Loader::Gather, 16) => Self::Gather16,
            (Loader::Raw, 16) => Self::Raw16,
            (Loader::Bare, 16) => Self::Bare16,
            (Loader::Fine, 16) => Self::Fine16,
            (Loader::Codes, 16) => Self::Codes16,
            _ => return None,
        })
    }

    /// Whether loading warps turn codes to bfloat16 by way of a stage.
    const fn is_staged(self) -> bool {
        matches!(
            self,
            Self::Staged64 | Self::FineStaged64 | Self::Pairs64 | Self::FinePairs64
        )
    }

    /// Whether what is multiplied with queries is 16-bit numbers as they are, by pages, by lists, or of a stage.
    const fn multiplies_numbers_of_16_bits(self) -> bool {
        self.is_staged()
            || matches!(
                self,
                Self::Tma64
                    | Self::Gather64
                    | Self::Tma32
                    | Self::Gather32
                    | Self::Tma16
                    | Self::Gather16
            )
    }

    const fn threads(self) -> i32 {
        match self {
            Self::Tma64
            | Self::Gather64
            | Self::Codes64
            | Self::Staged64
            | Self::FineStaged64
            | Self::Pairs64
            | Self::FinePairs64
            | Self::Tma32
            | Self::Gather32
            | Self::Tma16
            | Self::Gather16 => FM_DECODE_THREADS,
            Self::Codes16 => FM_DECODE_THREADS_2_LOADERS,
            Self::Raw64
            | Self::Raw32
            | Self::Raw16
            | Self::Bare64
            | Self::Bare32
            | Self::Bare16
            | Self::Fine64
            | Self::Fine32
            | Self::Fine16 => FM_DECODE_THREADS_RAW,
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

/// The decode kernels in the order of their indices: type, width, variant.
#[rustfmt::skip]
const DECODE: [&CStr; 59] = [
    c"fm_decode_bf16_512_tma_64", c"fm_decode_bf16_512_gather_64", c"fm_decode_bf16_512_raw_64", c"fm_decode_bf16_512_bare_64",
    c"fm_decode_bf16_512_tma_32", c"fm_decode_bf16_512_gather_32", c"fm_decode_bf16_512_raw_32", c"fm_decode_bf16_512_bare_32",
    c"fm_decode_bf16_512_tma_16", c"fm_decode_bf16_512_gather_16", c"fm_decode_bf16_512_raw_16", c"fm_decode_bf16_512_bare_16",
    c"fm_decode_bf16_512_codes_64", c"fm_decode_bf16_512_codes_16",
    c"fm_decode_bf16_512_fine_64", c"fm_decode_bf16_512_fine_32", c"fm_decode_bf16_512_fine_16",
    c"fm_decode_bf16_512_staged_64", c"fm_decode_bf16_512_finestaged_64", c"fm_decode_bf16_512_pairs_64", c"fm_decode_bf16_512_finepairs_64",
    c"fm_decode_bf16_576_tma_64", c"fm_decode_bf16_576_gather_64", c"fm_decode_bf16_576_raw_64", c"fm_decode_bf16_576_bare_64",
    c"fm_decode_bf16_576_tma_32", c"fm_decode_bf16_576_gather_32", c"fm_decode_bf16_576_raw_32", c"fm_decode_bf16_576_bare_32",
    c"fm_decode_bf16_576_tma_16", c"fm_decode_bf16_576_gather_16", c"fm_decode_bf16_576_raw_16", c"fm_decode_bf16_576_bare_16",
    c"fm_decode_bf16_576_codes_64", c"fm_decode_bf16_576_codes_16",
    c"fm_decode_fp16_512_tma_64", c"fm_decode_fp16_512_gather_64", c"fm_decode_fp16_512_raw_64", c"fm_decode_fp16_512_bare_64",
    c"fm_decode_fp16_512_tma_32", c"fm_decode_fp16_512_gather_32", c"fm_decode_fp16_512_raw_32", c"fm_decode_fp16_512_bare_32",
    c"fm_decode_fp16_512_tma_16", c"fm_decode_fp16_512_gather_16", c"fm_decode_fp16_512_raw_16", c"fm_decode_fp16_512_bare_16",
    c"fm_decode_fp16_576_tma_64", c"fm_decode_fp16_576_gather_64", c"fm_decode_fp16_576_raw_64", c"fm_decode_fp16_576_bare_64",
    c"fm_decode_fp16_576_tma_32", c"fm_decode_fp16_576_gather_32", c"fm_decode_fp16_576_raw_32", c"fm_decode_fp16_576_bare_32",
    c"fm_decode_fp16_576_tma_16", c"fm_decode_fp16_576_gather_16", c"fm_decode_fp16_576_raw_16", c"fm_decode_fp16_576_bare_16",
];

/// Every entry point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kernel {
    Plan(PlannerKernel),
    Decode {
        fp16: bool,
        rope: bool,
        variant: Variant,
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
const OTHERS: usize = 19;

impl Kernel {
    pub const COUNT: usize = OTHERS + DECODE.len();

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
            Self::Plan(PlannerKernel::Pairs),
            Self::Plan(PlannerKernel::Few),
            Self::Plan(PlannerKernel::OnePart),
            Self::Fill,
        ];
        for fp16 in [false, true] {
            for rope in [false, true] {
                let variants = &Variant::ALL[..Variant::count(fp16, rope)];
                all.extend(variants.iter().map(|variant| Self::Decode {
                    fp16,
                    rope,
                    variant: *variant,
                }));
            }
        }
        all
    }

    /// Position in [`Kernel::all`].
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
            Self::Plan(PlannerKernel::Pairs) => 15,
            Self::Plan(PlannerKernel::Few) => 16,
            Self::Plan(PlannerKernel::OnePart) => 17,
            Self::Fill => 18,
            Self::Decode { .. } => OTHERS + self.decode_index(),
        }
    }

    /// Position in [`DECODE`].
    const fn decode_index(self) -> usize {
        match self {
            Self::Decode {
                fp16,
                rope,
                variant,
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
            Self::Plan(PlannerKernel::Pairs) => c"fm_plan_pairs",
            Self::Plan(PlannerKernel::Few) => c"fm_plan_few",
            Self::Plan(PlannerKernel::OnePart) => c"fm_plan_one_part",
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
            Self::Decode { .. } => DECODE[self.decode_index()],
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
            Self::Decode { variant, .. } => variant.threads() as u32,
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
                variant,
            } = kernel
            else {
                continue;
            };
            let dtype = if fp16 { "fp16" } else { "bf16" };
            let width = if rope { 576 } else { 512 };
            let variant = format!("{variant:?}").to_lowercase();
            let (loader, rows) = variant.split_at(variant.len() - 2);
            let name = format!("fm_decode_{dtype}_{width}_{loader}_{rows}");
            assert_eq!(kernel.name().to_str(), Ok(name.as_str()));
        }
    }

    #[test]
    fn lists_of_codes_of_512_columns_are_staged_for_bf16_queries() {
        use DType::{Bf16, Fp16};
        use KvFormat::{Bf16 as Halves, Fp4V41, Fp8, Fp8V4, Fp8V32, Fp8V41};
        let of = |formats: &[KvFormat], rows, team, stages_codes, dtype, narrow| {
            let ctas = Ctas {
                rows,
                team,
                stages_codes,
            };
            Loader::of_lists(formats, ctas, dtype, narrow)
        };
        use Loader::{Bare, Codes, Fine, FinePairs, FineStaged, Gather, Pairs, Raw, Staged};
        for (formats, team, dtype, narrow, expected, many_short) in [
            ([Fp8V4, Fp8V4], 2, Bf16, true, Pairs, Pairs),
            ([Fp8V4, Fp8V41], 4, Bf16, true, Pairs, Pairs),
            ([Fp8V41, Fp4V41], 2, Bf16, true, FinePairs, FinePairs),
            ([Fp8V4, Fp4V41], 2, Bf16, true, FinePairs, FinePairs),
            ([Fp8V4, Fp8V4], 1, Bf16, true, Raw, Staged),
            ([Fp8V4, Fp8V4], 3, Bf16, true, Raw, Staged),
            ([Fp8V4, Fp8V4], 1, Fp16, true, Raw, Raw),
            ([Fp8V32, Fp8V32], 2, Bf16, false, Raw, Raw),
            ([Fp8V32, Fp8V32], 1, Bf16, false, Raw, Raw),
            ([Fp8, Fp8], 2, Bf16, true, Bare, Bare),
            ([Fp8V41, Fp4V41], 1, Bf16, true, Fine, Fine),
            ([Fp8V4, Fp4V41], 1, Bf16, true, FineStaged, FineStaged),
            ([Fp8V4, Halves], 2, Bf16, true, Codes, Codes),
            ([Halves, Halves], 2, Bf16, true, Gather, Gather),
        ] {
            for (stages_codes, expected) in [(false, expected), (true, many_short)] {
                let loader = of(&formats, 64, team, stages_codes, dtype, narrow);
                assert_eq!(loader, expected, "{formats:?} {team} {stages_codes}");
                let few = of(&formats, 16, team, stages_codes, dtype, narrow);
                assert_eq!(few, Loader::of_tokens(&formats));
            }
        }
    }

    #[test]
    fn every_loader_has_kernels_of_64_and_16_rows_and_only_mixed_caches_none_of_32() {
        use Loader::{Bare, Codes, Fine, FinePairs, FineStaged, Gather, Pairs, Raw, Staged, Tma};
        for rows in [64, 32, 16] {
            for staged in [Staged, FineStaged, Pairs, FinePairs] {
                assert_eq!(Variant::of(staged, rows).is_some(), rows == 64, "many rows");
            }
        }
        for loader in [Tma, Gather, Raw, Bare, Fine, Codes] {
            for rows in [64, 32, 16] {
                let variant = Variant::of(loader, rows).map(|variant| format!("{variant:?}"));
                let is_there = loader != Codes || rows != 32;
                assert_eq!(variant, is_there.then(|| format!("{loader:?}{rows}")));
            }
        }
    }

    #[test]
    fn ctas_have_the_threads_of_their_roles() {
        let threads = |variant| {
            let kernel = Kernel::Decode {
                fp16: false,
                rope: false,
                variant,
            };
            kernel.decode_threads()
        };
        let expected = [
            512, 512, 384, 384, 512, 512, 384, 384, 512, 512, 384, 384, 512, 640, 384, 384, 384,
            512, 512, 512, 512,
        ];
        assert_eq!(Variant::ALL.map(threads), expected);
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

    #[test]
    fn the_loader_can_read_every_cache() {
        use KvFormat::{Bf16, Fp4V41, Fp8, Fp8V4, Fp8V32, Fp8V41, Fp8V41Split};
        for (formats, loader) in [
            (&[Bf16, Bf16][..], Loader::Gather),
            (&[Fp8], Loader::Bare),
            (&[Fp8, Fp8], Loader::Bare),
            (&[Fp8V32], Loader::Raw),
            (&[Bf16, Fp4V41], Loader::Codes),
            (&[Fp8V4, Fp4V41], Loader::Codes),
            (&[Fp8V41, Fp4V41], Loader::Fine),
            (&[Fp8V41Split, Fp4V41], Loader::Fine),
            (&[Fp8, Fp4V41], Loader::Fine),
            (&[Fp8V32, Fp4V41], Loader::Codes),
            (&[Bf16, Fp8V32], Loader::Codes),
            (&[Fp8V4, Fp8V4], Loader::Raw),
            (&[Fp8, Fp8V32], Loader::Raw),
        ] {
            assert_eq!(Loader::of_tokens(formats), loader, "{formats:?}");
        }
    }
}
