//! Where finished rows go.

use std::f64::consts::LN_2;

use crate::element::Element;
use crate::{NOPE_DIM, Strided};

/// The outputs of a decode, and what is applied to them last.
pub(crate) struct Output {
    pub out: Strided<u16, 3>,
    pub lse: Strided<f32, 3>,
    pub empty_lse: f32,
    pub attn_sink: Option<Strided<f32, 1>>,
    pub max_logits: Option<Strided<f32, 3>>,
}

impl Output {
    /// Writes a normalised row and its log-sum-exp, given in base 2.
    ///
    /// # Safety
    /// `index` (request, token, head) lies in the outputs and its head in the sink, all live; nobody
    /// else uses the row.
    pub unsafe fn write_row<E: Element>(&self, index: [usize; 3], row: &[f32], lse2: f64) {
        let lse = lse2 * LN_2;
        // SAFETY: the caller's promise.
        let (sink, out) = unsafe {
            let written = if lse == f64::NEG_INFINITY {
                self.empty_lse
            } else {
                lse as f32
            };
            self.lse.write(index, written);
            (
                self.attn_sink.map(|sink| sink.read([index[2]])),
                self.out.row_mut(index, NOPE_DIM),
            )
        };
        let factor = sink.map_or(1.0, |sink| sink_factor(lse, f64::from(sink)));
        for (y, x) in out.iter_mut().zip(row) {
            *y = E::narrow(x * factor);
        }
    }

    /// Writes the largest score of a row, given in base 2, where that is asked for.
    ///
    /// # Safety
    /// As [`Output::write_row`].
    pub unsafe fn write_max(&self, index: [usize; 3], max2: f32) {
        if let Some(max_logits) = &self.max_logits {
            // SAFETY: the caller's promise.
            unsafe { max_logits.write(index, (f64::from(max2) * LN_2) as f32) };
        }
    }
}

/// `exp(lse) / (exp(lse) + exp(sink))`, without overflow.
fn sink_factor(lse: f64, sink: f64) -> f32 {
    let no_effect = lse == f64::NEG_INFINITY || sink == f64::NEG_INFINITY;
    if no_effect {
        1.0
    } else {
        (1.0 / (1.0 + (sink - lse).exp())) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::sink_factor;

    #[test]
    fn sink_limits() {
        let inf = f64::INFINITY;
        assert_eq!(sink_factor(3.0, 3.0), 0.5);
        assert_eq!(sink_factor(3.0, inf), 0.0);
        assert_eq!(sink_factor(3.0, -inf), 1.0);
        assert_eq!(sink_factor(-inf, -inf), 1.0);
        assert_eq!(sink_factor(-1e4, 1e4), 0.0);
        assert_eq!(sink_factor(1e4, -1e4), 1.0);
    }
}
