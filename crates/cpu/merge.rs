//! `merge_states`: the exact combination of two partial attentions.

use rayon::prelude::*;

use crate::element::{Element, with_element};
use crate::{Format, Strided};

/// Arguments of [`merge_states`]; all views have one shape `[b, s_q, h]` (or any three dimensions).
#[derive(Debug, Clone, Copy)]
pub struct MergeCpu {
    /// Element type of the three outputs.
    pub format: Format,
    /// Width of a row.
    pub d_v: usize,
    /// Rows of the first attention.
    pub out_a: Strided<u16, 3>,
    /// Its natural log-sum-exp.
    pub lse_a: Strided<f32, 3>,
    /// Rows of the second attention.
    pub out_b: Strided<u16, 3>,
    /// Its natural log-sum-exp.
    pub lse_b: Strided<f32, 3>,
    /// Rows of the joint attention; may be `out_a` or `out_b`.
    pub out: Strided<u16, 3>,
    /// Its natural log-sum-exp; may be `lse_a` or `lse_b`.
    pub lse: Strided<f32, 3>,
}

/// Combines two attentions over disjoint keys. Where one log-sum-exp is -inf the other side comes
/// through bit for bit; where both are, the result is zeros and -inf.
///
/// # Safety
/// Every view describes live, aligned memory of the common shape for the whole call (`d_v` elements for
/// the rows). `out` and `lse` are writable, do not overlap themselves or each other, are used by nobody
/// else, and either are exactly an input's view or overlap none.
///
/// ```
/// use ferromla_cpu::{Format, MergeCpu, Strided, merge_states};
/// let (a, b) = ([0x3f80u16; 4], [0x4000u16; 4]); // 1.0 and 2.0 in bfloat16
/// let (lse_a, lse_b) = ([0.0f32], [f32::NEG_INFINITY]);
/// let (mut out, mut lse) = ([0u16; 4], [0.0f32]);
/// let rows = |ptr| Strided::new(ptr, [1, 1, 1], [4, 4, 4]);
/// let scalars = |ptr| Strided::new(ptr, [1, 1, 1], [1, 1, 1]);
/// let args = MergeCpu {
///     format: Format::Bf16,
///     d_v: 4,
///     out_a: rows(a.as_ptr()),
///     lse_a: scalars(lse_a.as_ptr()),
///     out_b: rows(b.as_ptr()),
///     lse_b: scalars(lse_b.as_ptr()),
///     out: rows(out.as_mut_ptr()),
///     lse: scalars(lse.as_mut_ptr()),
/// };
/// // SAFETY: all views describe the arrays above.
/// unsafe { merge_states(&args) };
/// assert_eq!((out, lse), (a, lse_a));
/// ```
pub unsafe fn merge_states(args: &MergeCpu) {
    let [b, s_q, h] = args.out.shape();
    (0..b * s_q * h)
        .into_par_iter()
        .with_min_len(64)
        .for_each(|row| {
            let index = [row / (s_q * h), row / h % s_q, row % h];
            // SAFETY: the index lies in the common shape; rows are disjoint (caller's promise).
            with_element!(args.format, E => unsafe { merge_row::<E>(args, index) });
        });
}

/// Numbers of a row that are mixed at a time.
const CHUNK: usize = 128;

/// # Safety
/// As [`merge_states`]; nobody else uses the row at `index`.
unsafe fn merge_row<E: Element>(args: &MergeCpu, index: [usize; 3]) {
    // SAFETY: the caller's promise, here and below.
    let (lse_a, lse_b) = unsafe { (args.lse_a.read(index), args.lse_b.read(index)) };
    let state = Weights::new(lse_a, lse_b);
    // SAFETY: both inputs were read.
    unsafe { args.lse.write(index, state.lse) };
    let mut joint = [0u16; CHUNK];
    for start in (0..args.d_v).step_by(CHUNK) {
        let range = start..args.d_v.min(start + CHUNK);
        let joint = &mut joint[..range.len()];
        // SAFETY: the slices end before `out`, which may be one of them, is written.
        unsafe {
            let a = &args.out_a.row(index, args.d_v)[range.clone()];
            let b = &args.out_b.row(index, args.d_v)[range.clone()];
            state.mix::<E>(a, b, joint);
        }
        // SAFETY: nothing else borrows the row now.
        let out = unsafe { args.out.row_mut(index, args.d_v) };
        out[range].copy_from_slice(joint);
    }
}

/// How much of each side goes into a row.
struct Weights {
    a: f32,
    b: f32,
    lse: f32,
}

impl Weights {
    fn new(lse_a: f32, lse_b: f32) -> Self {
        // A side that saw no key takes no part, so that a NaN of the other one stays.
        let alone = |a, b, lse| Self { a, b, lse };
        match (lse_a == f32::NEG_INFINITY, lse_b == f32::NEG_INFINITY) {
            (true, true) => return alone(0.0, 0.0, f32::NEG_INFINITY),
            (true, false) => return alone(0.0, 1.0, lse_b),
            (false, true) => return alone(1.0, 0.0, lse_a),
            (false, false) => {}
        }
        let (a, b) = (f64::from(lse_a), f64::from(lse_b));
        let max = a.max(b); // the other one of a NaN, whose weight is NaN then, and with it all
        let (wa, wb) = ((a - max).exp(), (b - max).exp());
        let total = wa + wb;
        let lse = (max + total.ln()) as f32;
        Self {
            a: (wa / total) as f32,
            b: (wb / total) as f32,
            lse,
        }
    }

    fn mix<E: Element>(&self, a: &[u16], b: &[u16], joint: &mut [u16]) {
        match (self.a, self.b) {
            (0.0, 0.0) => joint.fill(0),
            (_, 0.0) => joint.copy_from_slice(a),
            (0.0, _) => joint.copy_from_slice(b),
            (weight_a, weight_b) => {
                let (mut wide_a, mut wide_b) = ([0.0; CHUNK], [0.0; CHUNK]);
                let (wide_a, wide_b) = (&mut wide_a[..a.len()], &mut wide_b[..a.len()]);
                E::widen(a, wide_a);
                E::widen(b, wide_b);
                for ((y, a), b) in joint.iter_mut().zip(wide_a).zip(wide_b) {
                    *y = E::narrow(weight_a * *a + weight_b * *b);
                }
            }
        }
    }
}
