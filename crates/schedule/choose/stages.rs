//! Which of two kernels lists of codes of 64 query rows get: one that multiplies codes as they lie in the cache, or one that turns them to
//! 16-bit numbers first and goes from list to list role by role.

use super::{Choice, Problem, Split};

/// What the second takes less between two lists, and more for a tile and once, in hundredths of a microsecond: from lists of 8 to 32 tiles, one
/// to 31 of them to a CTA, on an H200 (`docs/tried-staged.md`, "Rows by single CTAs").
const LESS_BETWEEN: i128 = 580;
const MORE_FOR_A_TILE: i128 = 20;
const MORE_AT_ONCE: i128 = 500;

impl Problem {
    /// Whether lists are so short, and workers have so many of them, that staging codes takes less time. Not where a result must not depend
    /// on how many others there are.
    pub fn stages_codes(&self, choice: &Choice) -> bool {
        let may_depend = matches!(self.split, Split::Auto | Split::Rest);
        if !self.has_lists() || !may_depend {
            return false;
        }
        let work = self.work(choice.rows);
        let less = LESS_BETWEEN - MORE_FOR_A_TILE * i128::from(work.tiles);
        work.units * less > MORE_AT_ONCE * i128::from(choice.workers)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Keys, Queries, Target, choose};
    use super::*;

    fn staged(q_len: i32, topk: i32, extra_topk: i32, split: Split) -> bool {
        let problem = Problem {
            batch: 1,
            queries: Queries::Sparse {
                q_len,
                topk,
                extra_topk,
            },
            group: 64,
            kv_heads: 1,
            keys: Keys::Codes,
            causal: false,
            max_seq_len: 0,
            split,
            target: Target::Gpu {
                sm_count: 132,
                clusters: [66, 30, 15, 7],
                memory: 4814,
            },
        };
        let choice = choose(&problem);
        assert_eq!(choice.rows, 64);
        problem.stages_codes(&choice)
    }

    #[test]
    fn many_short_lists_are_staged() {
        for (lists, topk, extra, expected) in [
            (4096, 512, 0, true),
            (4096, 1024, 0, true),
            (4096, 2048, 0, false),
            (256, 128, 512, true),
            (128, 128, 512, false),
            (256, 128, 1024, false),
            (128, 2048, 0, false),
        ] {
            let is = staged(lists, topk, extra, Split::Auto);
            assert_eq!(is, expected, "{lists} of {topk} + {extra}");
        }
        assert!(staged(4096, 512, 0, Split::Rest));
    }

    #[test]
    fn how_many_there_are_counts_only_where_results_may_depend_on_it() {
        for split in [Split::Never, Split::INVARIANT, Split::Fixed(1)] {
            assert!(!staged(4096, 512, 0, split), "{split:?}");
        }
    }
}
