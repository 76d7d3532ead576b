//! Textbook attention in float64, one key after the other.

use super::arrays::indices;
use super::case::{Inputs, Outputs};
use super::from_bits;

pub struct Expected {
    pub out: Vec<f64>,
    pub lse: f64,
}

/// The result of one row (request, token, head) for the given sequence length.
pub fn attend(inputs: &Inputs, [request, token, head]: [usize; 3], seq_len: i32) -> Expected {
    let case = &inputs.case;
    let widen = |bits: Vec<u16>| -> Vec<f64> {
        bits.into_iter()
            .map(|x| f64::from(from_bits(case.format, x)))
            .collect()
    };
    let pages = inputs.cache_pages();
    let columns = inputs.table.shape[1];
    let len = i64::from(seq_len).clamp(0, (columns * case.page_size) as i64);
    let end = if case.causal {
        len - case.s_q as i64 + token as i64 + 1
    } else {
        len
    };
    let kv_head = head / (case.h / case.h_kv);
    let q = widen(inputs.q.get_row([request, token, head]));

    let mut keys = Vec::new();
    for position in 0..end.max(0) as usize {
        let page = inputs.table.row([request, position / case.page_size])[0];
        if page < 0 || page >= pages {
            continue;
        }
        let index = [page as usize, position % case.page_size, kv_head];
        let k = widen(inputs.cache.get_row(index));
        let dot: f64 = q.iter().zip(&k).map(|(a, b)| a * b).sum();
        keys.push((dot * case.scale, k));
    }
    if keys.is_empty() {
        return Expected {
            out: vec![0.0; 512],
            lse: f64::NEG_INFINITY,
        };
    }
    let max = keys
        .iter()
        .map(|(score, _)| *score)
        .fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = keys.iter().map(|(score, _)| (score - max).exp()).sum();
    let lse = max + sum.ln();
    let mut out = vec![0.0; 512];
    for (score, k) in &keys {
        let p = (score - max).exp() / sum;
        out.iter_mut().zip(k).for_each(|(out, v)| *out += p * v);
    }
    if let Some(sink) = &case.sink {
        // exp(lse) / (exp(lse) + exp(sink)), by the larger exponent.
        let sink = f64::from(sink[head]);
        let top = lse.max(sink);
        let factor = match sink {
            f64::INFINITY => 0.0,
            _ => (lse - top).exp() / ((lse - top).exp() + (sink - top).exp()),
        };
        out.iter_mut().for_each(|x| *x *= factor);
    }
    Expected { out, lse }
}

/// Compares every row with the reference. Tighter than the specification: the error left is the
/// rounding of the output type, plus what float32 sums lose.
pub fn assert_close(inputs: &Inputs, got: &Outputs) {
    assert_close_with_lens(inputs, got, &inputs.case.seq_lens);
}

pub fn assert_close_with_lens(inputs: &Inputs, got: &Outputs, seq_lens: &[i32]) {
    let case = &inputs.case;
    let (mut xy, mut xx, mut yy) = (0.0, 0.0, 0.0);
    for index in indices(got.out.shape) {
        let expected = attend(inputs, index, seq_lens[index[0]]);
        let out = got.out_row(case.format, index);
        let place = || format!("at {index:?} of {case:?}");
        for (x, y) in out.iter().map(|x| f64::from(*x)).zip(&expected.out) {
            let error = (x - y).abs();
            assert!(
                error <= 4e-5 || error <= y.abs() * 2.01 / 512.0,
                "out {x} not {y} {}",
                place()
            );
            xy += x * y;
            xx += x * x;
            yy += y * y;
        }
        assert_lse(got.lse.row(index)[0], expected.lse, place);
    }
    let angle = if xx + yy > 0.0 {
        1.0 - 2.0 * xy / (xx + yy)
    } else {
        0.0
    };
    assert!(angle <= 5e-6, "1 - cosine is {angle} over {case:?}");
}

fn assert_lse(got: f32, expected: f64, place: impl Fn() -> String) {
    if expected == f64::NEG_INFINITY {
        assert_eq!(got, f32::NEG_INFINITY, "lse {}", place());
        return;
    }
    let error = (f64::from(got) - expected).abs();
    let near = error <= 1e-6 || error <= expected.abs() * 4e-6;
    assert!(near, "lse {got} not {expected} {}", place());
}
