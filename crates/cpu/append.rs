//! `append_kv`: new tokens into their cache slots, bit for bit.

use rayon::prelude::*;

use crate::{NOPE_DIM, Parts, ROPE_DIM, Strided};

/// Arguments of [`append_kv`].
#[derive(Debug, Clone, Copy)]
pub struct AppendCpu {
    /// Rows of `[t]`: the new tokens' latents and rope parts.
    pub tokens: Parts<1>,
    /// Rows of `[pages, page_size]`.
    pub cache: Parts<2>,
    /// `[t]`: `page * page_size + offset`.
    pub slots: Strided<i64, 1>,
}

/// Below this many tokens one thread copies them all.
const TOKENS_PER_LANE: usize = 256;

/// Copies each token's row to its slot. Negative slots and slots past the cache are skipped. Where
/// several tokens name one slot the last of them stays, whatever the number of threads.
///
/// # Safety
/// Every view describes live, aligned memory of its shape for the whole call (rows of 512 and 64
/// elements); the cache is writable, used by nobody else, overlaps no input, and its rows do not overlap
/// each other. `rope` is present in both of tokens and cache or in neither, with the shape of `nope`;
/// `slots` has one entry per token.
///
/// ```
/// use ferromla_cpu::{AppendCpu, Parts, Strided, append_kv};
/// let (tokens, slots) = (vec![7u16; 512], [1i64]);
/// let mut cache = vec![0u16; 2 * 512]; // two pages of one token
/// let args = AppendCpu {
///     tokens: Parts { nope: Strided::new(tokens.as_ptr(), [1], [512]), rope: None },
///     cache: Parts { nope: Strided::new(cache.as_mut_ptr(), [2, 1], [512, 512]), rope: None },
///     slots: Strided::new(slots.as_ptr(), [1], [1]),
/// };
/// // SAFETY: all views describe the vectors above.
/// unsafe { append_kv(&args) };
/// assert_eq!((cache[0], cache[512]), (0, 7));
/// ```
pub unsafe fn append_kv(args: &AppendCpu) {
    let [tokens] = args.slots.shape();
    let lanes = tokens
        .div_ceil(TOKENS_PER_LANE)
        .clamp(1, rayon::current_num_threads());
    // A lane has the slots of its residue to itself: no races, and duplicates keep their order.
    (0..lanes).into_par_iter().for_each(|lane| {
        for token in 0..tokens {
            // SAFETY: the token lies in the slots.
            let slot = unsafe { args.slots.read([token]) };
            match locate(slot, args.cache.nope.shape()) {
                // SAFETY: the slot lies in the cache and belongs to this lane.
                Some(index) if slot as usize % lanes == lane => unsafe {
                    copy_token(args, token, index);
                },
                _ => {}
            }
        }
    });
}

/// Page and offset of a slot, or None outside the cache.
fn locate(slot: i64, [pages, page_size]: [usize; 2]) -> Option<[usize; 2]> {
    let slot = usize::try_from(slot).ok()?;
    let page = slot.checked_div(page_size)?;
    (page < pages).then_some([page, slot % page_size])
}

/// # Safety
/// As [`append_kv`], for a token and a slot inside; nobody else uses the slot.
unsafe fn copy_token(args: &AppendCpu, token: usize, index: [usize; 2]) {
    // SAFETY: the caller's promise.
    unsafe {
        let row = args.tokens.nope.row([token], NOPE_DIM);
        args.cache
            .nope
            .row_mut(index, NOPE_DIM)
            .copy_from_slice(row);
        if let (Some(tokens), Some(cache)) = (&args.tokens.rope, &args.cache.rope) {
            cache
                .row_mut(index, ROPE_DIM)
                .copy_from_slice(tokens.row([token], ROPE_DIM));
        }
    }
}
