//! What there is to plan for: a batch in the caller's terms, and where it will run.

/// Where a plan will run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// A GPU with this many streaming multiprocessors.
    Gpu {
        /// Streaming multiprocessors.
        sm_count: i32,
        /// Clusters of 2, 4, 8 and 16 CTAs, one to a multiprocessor, that run at once.
        clusters: [i32; 4],
        /// What its memory's clock and width give, GB/s; 0 where that is not known.
        memory: i32,
    },
    /// The CPU backend with this many threads.
    Cpu {
        /// Threads.
        threads: i32,
    },
}

impl Target {
    /// The same with no more than this many streaming multiprocessors of a GPU, if it is given.
    pub fn at_most(self, num_sms: Option<i64>) -> Self {
        match (self, num_sms) {
            (
                Self::Gpu {
                    sm_count,
                    mut clusters,
                    memory,
                },
                Some(most),
            ) => {
                let sm_count = most.clamp(1, sm_count.max(1).into()) as i32;
                for (count, size) in clusters.iter_mut().zip([2, 4, 8, 16]) {
                    *count = (*count).min(sm_count / size);
                }
                Self::Gpu {
                    sm_count,
                    clusters,
                    memory,
                }
            }
            (target, _) => target,
        }
    }
}

/// How units may be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Wherever the even shares of the workers fall.
    Auto,
    /// Every unit into this many parts, at least 1 (fewer where it has fewer tiles, and 65,535 at most).
    Fixed(i32),
    /// By the unit's own length only, so that results do not depend on the rest of the batch.
    Invariant {
        /// Parts of every unit, as with `Fixed`; None: as many as suit many requests, and few as well as these allow. A plan has room for
        /// those of units that are all as long as [`Problem::max_seq_len`]: on a GPU, of many units, up to 2 MB of
        /// partial results for 64 query rows of each.
        parts: Option<i32>,
    },
    /// Not at all, nor do the CTAs of a cluster share the tiles of a unit.
    Never,
    /// Lists ([`Queries::Sparse`]) whose lengths are not given: those that are left when all workers have as many. Others as `Never`.
    Rest,
}

impl Split {
    /// [`Split::Invariant`] of no given number of parts.
    pub const INVARIANT: Self = Self::Invariant { parts: None };

    pub(crate) const fn is_invariant(self) -> bool {
        matches!(self, Self::Invariant { .. })
    }
}

/// How many query tokens the requests have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queries {
    /// Every request as many.
    Uniform {
        /// Query tokens of every request.
        q_len: i32,
    },
    /// Each request its own number, by `qo_indptr`, which the choice of a layout does not look at.
    Ragged {
        /// Query tokens of all requests.
        tokens: i32,
        /// Those of the request that has most, if it is known.
        most: Option<i32>,
    },
    /// Every request as many, each with a list of its own keys. [`Problem::causal`] and
    /// [`Problem::max_seq_len`] have no meaning then.
    Sparse {
        /// Query tokens of every request.
        q_len: i32,
        /// Entries of a token's list.
        topk: i32,
        /// Entries of a token's list of the extra cache.
        extra_topk: i32,
    },
}

/// What attention reads, as far as is known: it decides what a launch waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keys {
    /// Whole pages of 16-bit numbers, which boxes load: memory is the limit of CTAs that share no tile, not what they do with it.
    Pages,
    /// Rows of 16-bit numbers, listed or of pages of another size.
    Rows,
    /// Rows of codes, in pages or listed.
    Codes,
    /// The same with scales in each row: what is done with them takes longer.
    ScaledCodes,
    /// Rows of two caches, one of codes beside one of another kind.
    Mixed,
}

/// A batch to plan for, in the caller's terms. Everything but the lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Requests.
    pub batch: i32,
    /// Query tokens of the requests.
    pub queries: Queries,
    /// Query heads per KV head.
    pub group: i32,
    /// KV heads.
    pub kv_heads: i32,
    /// What is read.
    pub keys: Keys,
    /// Query token `i` of a request's `q_len` sees keys `0 ..= seq_len - q_len + i` only.
    pub causal: bool,
    /// Longer lengths are clamped to this.
    pub max_seq_len: i32,
    /// How units may be cut.
    pub split: Split,
    /// Where the plan will run.
    pub target: Target,
}
