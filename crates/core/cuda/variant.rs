//! The decode kernels of a type of queries and a width of rows: how they load the cache, for how many query rows.

use crate::dtype::{DType, KvFormat, Operands};
use crate::params::{FM_DECODE_THREADS, FM_DECODE_THREADS_2_LOADERS, FM_DECODE_THREADS_RAW};

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

/// How the CTAs of an item go through its tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Walk {
    /// One CTA, or a team for different rows.
    Single,
    /// They share them for the same rows.
    By2,
    By4,
    By8,
    By16,
    /// One CTA, in steps that are added up.
    Steps,
}

impl Walk {
    pub const ALL: [Self; 6] = [
        Self::Single,
        Self::By2,
        Self::By4,
        Self::By8,
        Self::By16,
        Self::Steps,
    ];

    /// For so many CTAs, a power of two, that share an item's tiles.
    pub const fn of(ctas: i32, steps: bool) -> Self {
        if steps {
            Self::Steps
        } else {
            Self::ALL[ctas.ilog2() as usize]
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
    pub const fn count(fp16: bool, rope: bool) -> usize {
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

    /// Whether there is a kernel of it. With 64 rows, and 32 over whole pages of 16-bit numbers, single CTAs have an item. Those of 16-bit
    /// numbers may go in steps.
    pub const fn has(self, walk: Walk) -> bool {
        match (walk, self) {
            (Walk::Single, _)
            | (
                Walk::Steps,
                Self::Tma64
                | Self::Gather64
                | Self::Tma32
                | Self::Gather32
                | Self::Tma16
                | Self::Gather16,
            ) => true,
            (Walk::Steps, _) => false,
            (
                _,
                Self::Gather32
                | Self::Raw32
                | Self::Bare32
                | Self::Fine32
                | Self::Tma16
                | Self::Gather16
                | Self::Raw16
                | Self::Bare16
                | Self::Fine16
                | Self::Codes16,
            ) => true,
            _ => false,
        }
    }

    /// Whether loading warps turn codes to bfloat16 by way of a stage.
    pub const fn is_staged(self) -> bool {
        matches!(
            self,
            Self::Staged64 | Self::FineStaged64 | Self::Pairs64 | Self::FinePairs64
        )
    }

    /// Whether what is multiplied with queries is 16-bit numbers as they are, by pages, by lists, or of a stage.
    pub const fn multiplies_numbers_of_16_bits(self) -> bool {
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

    /// Of a CTA. `rope`: keys of 576 columns.
    pub const fn threads(self, rope: bool) -> i32 {
        match self {
            Self::Raw32 | Self::Raw16 if rope => FM_DECODE_THREADS_RAW,
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
            | Self::Gather16
            | Self::Raw32
            | Self::Raw16
            | Self::Fine32
            | Self::Fine16 => FM_DECODE_THREADS,
            Self::Codes16 => FM_DECODE_THREADS_2_LOADERS,
            Self::Raw64 | Self::Bare64 | Self::Bare32 | Self::Bare16 | Self::Fine64 => {
                FM_DECODE_THREADS_RAW
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
