//! `append_kv`: new tokens into their cache slots, bit for bit or quantised.

use rayon::prelude::*;

use crate::rows::RowBuffer;
use crate::{CacheCpu, NOPE_DIM, ROPE_DIM, Rows, Strided};

/// Arguments of [`append_kv`].
#[derive(Debug, Clone, Copy)]
pub struct AppendCpu {
    /// Rows of `[t]`: the new tokens' latents and rope parts.
    pub tokens: Rows<1>,
    /// Of one KV head.
    pub cache: CacheCpu,
    /// `[t]`: `page * page_size + offset`.
    pub slots: Strided<i64, 1>,
    /// Round float32 scales up to powers of two.
    pub round_scale: bool,
}

/// Below this many tokens one thread copies them all.
const TOKENS_PER_LANE: usize = 256;

/// Writes each token's row to its slot. Negative slots and slots past the cache are skipped. Where
/// several tokens name one slot the last of them stays, whatever the number of threads.
///
/// # Safety
/// Every view describes live, aligned memory of its shape for the whole call (rows of 512 and 64
/// elements); the cache is writable, used by nobody else, overlaps no input, and its rows do not overlap
/// each other. Rows of tokens and cache have one width, and their two parts one shape; those of a cache that is
/// not quantised are 16-bit and of the type of the tokens. `slots` has one entry per token.
///
/// ```
/// use ferromla_cpu::{AppendCpu, CacheCpu, Parts, Rows, Strided, append_kv};
/// let (tokens, slots) = (vec![7u16; 512], [1i64]);
/// let mut cache = vec![0u16; 2 * 512]; // two pages of one token
/// let pages = Strided::new(cache.as_mut_ptr(), [2, 1, 1], [512, 512, 0]);
/// let args = AppendCpu {
///     tokens: Rows::Bf16(Parts { nope: Strided::new(tokens.as_ptr(), [1], [512]), rope: None }),
///     cache: CacheCpu::Plain(Rows::Bf16(Parts { nope: pages, rope: None })),
///     slots: Strided::new(slots.as_ptr(), [1], [1]),
///     round_scale: true,
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
    let [pages, page_size, _] = args.cache.shape();
    // A lane has the slots of its residue to itself: no races, and duplicates keep their order.
    (0..lanes).into_par_iter().for_each(|lane| {
        let mut buffer = RowBuffer::EMPTY;
        for token in 0..tokens {
            // SAFETY: the token lies in the slots.
            let slot = unsafe { args.slots.read([token]) };
            match locate(slot, [pages, page_size]) {
                // SAFETY: the slot lies in the cache and belongs to this lane.
                Some(index) if slot as usize % lanes == lane => unsafe {
                    write_token(args, token, index, &mut buffer);
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
unsafe fn write_token(
    args: &AppendCpu,
    token: usize,
    [page, offset]: [usize; 2],
    buffer: &mut RowBuffer,
) {
    match &args.cache {
        // SAFETY: the caller's promise.
        CacheCpu::Quantised(cache) => unsafe {
            cache.write(
                [page, offset],
                &args.tokens,
                [token],
                args.round_scale,
                buffer,
            );
        },
        // SAFETY: as above.
        CacheCpu::Plain(cache) => unsafe {
            copy_token(&args.tokens, token, cache, [page, offset, 0])
        },
    }
}

/// # Safety
/// As [`write_token`]; both are 16-bit rows.
unsafe fn copy_token(tokens: &Rows<1>, token: usize, cache: &Rows<3>, index: [usize; 3]) {
    let (Some(tokens), Some(cache)) = (tokens.half(), cache.half()) else {
        unreachable!("the caller's promise");
    };
    // SAFETY: the caller's promise.
    unsafe {
        let row = tokens.nope.row([token], NOPE_DIM);
        cache.nope.row_mut(index, NOPE_DIM).copy_from_slice(row);
        if let (Some(tokens), Some(cache)) = (&tokens.rope, &cache.rope) {
            cache
                .row_mut(index, ROPE_DIM)
                .copy_from_slice(tokens.row([token], ROPE_DIM));
        }
    }
}
