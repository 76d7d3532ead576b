//! The online softmax of one row over KV tiles, in base 2 and float32.

use crate::TILE_TOKENS;
use crate::exp2::exp2;

/// Partial sums kept side by side, so that the loops below vectorise.
const LANES: usize = 8;

/// Running maximum of the scaled scores, and the sum of `2^(score - max)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowState {
    pub max: f32,
    pub sum: f32,
}

impl RowState {
    pub const EMPTY: Self = Self {
        max: f32::NEG_INFINITY,
        sum: 0.0,
    };

    /// Turns a tile's raw scores into probabilities relative to the new maximum, and gives the factor
    /// that brings what was accumulated before to it. The first `seen` scores count.
    ///
    /// A NaN score is no maximum but makes its probability and the sum NaN; a score of +inf does so
    /// too, as in `exp(inf - inf)`.
    pub fn fold(
        &mut self,
        scores: &mut [f32; TILE_TOKENS],
        seen: usize,
        mask: &[f32; TILE_TOKENS],
        scale_log2: f32,
    ) -> f32 {
        scores[seen..].fill(f32::NEG_INFINITY);
        for (score, mask) in scores[..seen].iter_mut().zip(mask) {
            // An absent token's row is zeros, but 0 * inf in q would still be NaN: replace, not add.
            *score = if *mask == 0.0 {
                *score * scale_log2
            } else {
                *mask
            };
        }
        let max = scores
            .chunks_exact(LANES)
            .fold([self.max; LANES], |max, x| {
                std::array::from_fn(|i| if x[i] > max[i] { x[i] } else { max[i] })
            });
        let max = max.into_iter().fold(self.max, f32::max);
        let base = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let mut sum = [0.0; LANES];
        for chunk in scores.chunks_exact_mut(LANES) {
            for (x, sum) in chunk.iter_mut().zip(&mut sum) {
                *x = exp2(*x - base);
                *sum += *x;
            }
        }
        let rescale = if max == self.max {
            1.0
        } else {
            exp2(self.max - base)
        };
        self.max = max;
        self.sum = self.sum * rescale + sum.into_iter().sum::<f32>();
        rescale
    }

    /// What to multiply the accumulated `P V` with. A row that saw no key has accumulated zeros.
    pub fn normaliser(&self) -> f32 {
        if self.sum == 0.0 { 0.0 } else { 1.0 / self.sum }
    }

    /// Log-sum-exp in base 2; -inf for a row that saw no key.
    pub fn lse2(&self) -> f64 {
        f64::from(self.max) + f64::from(self.sum).log2()
    }
}
