//! Attention of query tokens over a paged latent cache: over the tokens of a request (decode and prefill), or
//! over lists of tokens (sparse decode and prefill).
//!
//! The plan's workers run in parallel, each going through its items in order: the same items, split
//! and partial results as on a GPU. Within an item the keys go by in tiles of 64 tokens: scores by one
//! matrix product, the online softmax row by row, `P V` by another matrix product.

use std::ops::Range;

use ferromla_schedule::{PlanView, WorkItem};
use rayon::prelude::*;

use crate::combine::combine;
use crate::element::{Element, with_element};
use crate::keys::KeysCpu;
use crate::matrix::{Matrix, multiply};
use crate::output::Output;
use crate::softmax::RowState;
use crate::tile::Tile;
use crate::unit::{Unit, keys_seen};
use crate::{CacheCpu, Format, NOPE_DIM, Rows, Strided, TILE_TOKENS};

/// What queries are multiplied by.
#[derive(Debug, Clone, Copy)]
pub enum QueryScale {
    /// All by one number.
    One(f32),
    /// Each row by its own: `[b, s_q, h]`, as the rows of `q`.
    Rows(Strided<f32, 3>),
}

/// Arguments of [`decode`]. `h = h_kv * group`; `d_qk` is 576, or 512 where the rope parts are absent.
#[derive(Debug, Clone, Copy)]
pub struct DecodeCpu<'a> {
    /// Element type of out.
    pub format: Format,
    /// Rows of `[b, s_q, h]`. Ragged queries: `[b, t, h]` with stride 0 along `b`, as `out` and `lse`; the plan's
    /// items say which tokens are a request's.
    pub q: Rows<3>,
    /// What they are multiplied by.
    pub q_scale: QueryScale,
    /// Pages of rows as wide as those of `q`.
    pub kv_cache: CacheCpu,
    /// Which tokens of the cache are the keys.
    pub keys: KeysCpu,
    /// Query heads per KV head.
    pub group: usize,
    /// Query token `i` sees keys `0 ..= seq_len - q_len + i` only.
    pub causal: bool,
    /// Factor on the scores, usually `d_qk^-0.5`.
    pub softmax_scale: f64,
    /// `[h]`: `out` is multiplied by `exp(lse) / (exp(lse) + exp(sink))`.
    pub attn_sink: Option<Strided<f32, 1>>,
    /// Made for these shapes.
    pub plan: PlanView<'a>,
    /// Rows of one unit of the plan.
    pub unit_rows: usize,
    /// Rows of `[b, s_q, h]`, 512 wide.
    pub out: Strided<u16, 3>,
    /// `[b, s_q, h]`, natural logarithm.
    pub lse: Strided<f32, 3>,
    /// The `lse` of rows that see no key.
    pub empty_lse: f32,
    /// `[b, s_q, h]`: the largest scaled score, -inf where there is no key. With a plan that splits nothing.
    pub max_logits: Option<Strided<f32, 3>>,
    /// `[slots * unit_rows]` rows of 512: partial results of split units.
    pub partial_out: Strided<f32, 1>,
    /// `[slots * unit_rows]`, base 2.
    pub partial_lse: Strided<f32, 1>,
}

/// Decodes. A row that sees no key gives zeros and an `lse` of `empty_lse`; so does one whose every score is
/// -inf.
///
/// # Safety
/// - Every view describes live, aligned memory of its shape (rows of 512 and 64 elements for the nope
///   and rope parts, 512 for `out` and `partial_out`) for the whole call; `out`, `lse`, `partial_out` and
///   `partial_lse` are writable, used by nobody else, and overlap neither each other nor themselves. (Along a
///   batch of stride 0 they do: then no two requests of the plan have a query token in common.)
/// - `q`, `out` and `lse` have one shape, with `group` dividing its heads; rows of q and cache have one width,
///   and their two parts one shape; pages hold at least one token.
/// - The plan was made for this batch, these query tokens, `group`, KV heads and `causal`, and for lists where the
///   keys are lists, of these numbers of entries; an extra cache has rows as `kv_cache` and one KV head, as
///   `kv_cache` has then.
///
/// # Panics
/// When the partial buffers are too small for the plan's slots.
///
/// ```
/// use ferromla_cpu::{CacheCpu, DecodeCpu, Format, KeysCpu, Parts, QueryScale, Rows, Strided, decode};
/// use ferromla_schedule::{Keys, PlanView, Problem, Queries, Split, Target, layout, plan_into};
/// // One request, one head, one cached token: attention gives back its value.
/// let problem = Problem {
///     batch: 1,
///     queries: Queries::Uniform { q_len: 1 },
///     group: 1,
///     kv_heads: 1,
///     keys: Keys::Pages,
///     causal: true,
///     max_seq_len: 1,
///     split: Split::Auto,
///     target: Target::Cpu { threads: 1 },
/// };
/// let shape = problem.shape()?;
/// let mut words = vec![0; layout(&shape)?.words()];
/// plan_into(&shape, [1].as_slice(), None, &mut words)?;
///
/// let one = 0x3f80u16; // 1.0 in bfloat16
/// let (q, kv, table) = (vec![0u16; 512], vec![one; 512], [0i32]);
/// let (mut out, mut lse) = (vec![0u16; 512], [0.0f32]);
/// let rows = |ptr| Strided::new(ptr, [1, 1, 1], [512, 512, 512]);
/// let none = Strided::new(std::ptr::NonNull::dangling().as_ptr(), [0], [1]);
/// let args = DecodeCpu {
///     format: Format::Bf16,
///     q: Rows::Bf16(Parts { nope: rows(q.as_ptr()), rope: None }),
///     q_scale: QueryScale::One(1.0),
///     kv_cache: CacheCpu::Plain(Rows::Bf16(Parts { nope: rows(kv.as_ptr()), rope: None })),
///     keys: KeysCpu::Pages { block_table: Strided::new(table.as_ptr(), [1, 1], [1, 1]) },
///     group: 1,
///     causal: true,
///     softmax_scale: 512f64.powf(-0.5),
///     attn_sink: None,
///     plan: PlanView::new(&shape, &words)?,
///     unit_rows: shape.unit_rows as usize,
///     out: rows(out.as_mut_ptr()),
///     lse: Strided::new(lse.as_mut_ptr(), [1, 1, 1], [1, 1, 1]),
///     empty_lse: f32::NEG_INFINITY,
///     max_logits: None,
///     partial_out: none,
///     partial_lse: none,
/// };
/// // SAFETY: all views describe the vectors above.
/// unsafe { decode(&args) };
/// assert!(out.iter().all(|x| *x == one) && lse == [0.0]);
/// # Ok::<(), ferromla_schedule::PlanError>(())
/// ```
pub unsafe fn decode(args: &DecodeCpu) {
    // SAFETY: the caller's promise.
    with_element!(args.format, E => unsafe { decode_as::<E>(args) });
}

/// # Safety
/// As [`decode`].
unsafe fn decode_as<E: Element>(args: &DecodeCpu) {
    let plan = &args.plan;
    let output = Output {
        out: args.out,
        lse: args.lse,
        empty_lse: args.empty_lse,
        attn_sink: args.attn_sink,
        max_logits: args.max_logits,
    };
    (0..plan.workers())
        .into_par_iter()
        .map(|worker| plan.worker(worker))
        .filter(|items| !items.is_empty())
        .for_each_init(
            || Scratch::new(args),
            |scratch, items| {
                for item in items {
                    // SAFETY: the caller's promise; no two items share output rows or slots.
                    unsafe { run_item::<E>(args, &output, item, scratch) };
                }
            },
        );
    // SAFETY: the caller's promise; all partial results are written.
    unsafe { combine::<E>(args, &output) };
}

/// A score is summed in parts of this many products: shorter chains of float32 additions lose less, and
/// the error of a score is that of `lse`.
const DOT_PART: usize = 64;

/// What one worker computes in, kept from item to item.
struct Scratch {
    /// `[rows, width]`
    q: Vec<f32>,
    tile: Tile,
    /// `[rows, 64]`: scores, then probabilities.
    scores: Vec<[f32; TILE_TOKENS]>,
    /// `[rows, 512]`: the sum of `P V`.
    acc: Vec<f32>,
    state: Vec<RowState>,
    runs: Vec<Run>,
}

/// Neighbouring rows that see the same leading tokens of a tile.
struct Run {
    rows: Range<usize>,
    seen: usize,
}

impl Scratch {
    fn new(args: &DecodeCpu) -> Self {
        let width = args.q.width();
        let rows = args.unit_rows.min(args.q.shape()[1] * args.group);
        Self {
            q: vec![0.0; rows * width],
            tile: Tile::new(width),
            scores: vec![[0.0; TILE_TOKENS]; rows],
            acc: vec![0.0; rows * NOPE_DIM],
            state: vec![RowState::EMPTY; rows],
            runs: Vec::new(),
        }
    }

    /// Loads the unit's queries and forgets the last item.
    ///
    /// # Safety
    /// The unit lies in the queries, which describe live memory.
    unsafe fn begin(&mut self, unit: &Unit, args: &DecodeCpu) {
        for (row, out) in self
            .q
            .chunks_exact_mut(self.tile.width)
            .take(unit.rows)
            .enumerate()
        {
            let index = unit.index(row);
            // SAFETY: the caller's promise.
            let scale = unsafe {
                args.q.read(index, out);
                match &args.q_scale {
                    QueryScale::One(scale) => *scale,
                    QueryScale::Rows(scales) => scales.read(index),
                }
            };
            if scale != 1.0 {
                out.iter_mut().for_each(|x| *x *= scale);
            }
        }
        self.acc[..unit.rows * NOPE_DIM].fill(0.0);
        self.state[..unit.rows].fill(RowState::EMPTY);
    }

    /// Sorts the unit's rows by how much of the loaded tile they see. Keys a row does not attend stay
    /// out of its products altogether, so that nothing in them, NaN included, can reach it.
    fn find_runs(&mut self, unit: &Unit, seen: impl Fn(usize) -> usize) {
        self.runs.clear();
        for (token, rows) in unit.tokens() {
            let seen = seen(token);
            match self.runs.last_mut() {
                Some(last) if last.seen == seen => last.rows.end = rows.end,
                _ => self.runs.push(Run { rows, seen }),
            }
        }
    }

    /// Folds the loaded tile into the rows.
    fn attend(&mut self, scale_log2: f32) {
        let Self {
            q,
            tile,
            scores,
            acc,
            state,
            runs,
        } = self;
        let width = tile.width;
        for Run { rows, seen } in runs.iter().filter(|run| run.seen > 0) {
            let count = rows.len();
            let matrix = |data, rows, cols, row_stride, col_stride| Matrix {
                data,
                rows,
                cols,
                row_stride,
                col_stride,
            };
            let scores = &mut scores[rows.clone()];
            let acc = &mut acc[rows.start * NOPE_DIM..rows.end * NOPE_DIM];
            for part in (0..width).step_by(DOT_PART) {
                let dims = DOT_PART.min(width - part);
                let queries = matrix(&q[rows.start * width + part..], count, dims, width, 1);
                let keys = matrix(&tile.rows[part..], dims, *seen, 1, width);
                multiply(
                    queries,
                    keys,
                    scores.as_flattened_mut(),
                    TILE_TOKENS,
                    part > 0,
                );
            }
            let states = state[rows.clone()].iter_mut();
            for ((state, scores), acc) in
                states.zip(&mut *scores).zip(acc.chunks_exact_mut(NOPE_DIM))
            {
                let rescale = state.fold(scores, *seen, &tile.mask, scale_log2);
                if rescale != 1.0 {
                    acc.iter_mut().for_each(|x| *x *= rescale);
                }
            }
            let weights = matrix(scores.as_flattened(), count, *seen, TILE_TOKENS, 1);
            let values = matrix(&tile.rows, *seen, NOPE_DIM, width, 1);
            multiply(weights, values, acc, NOPE_DIM, true);
        }
    }
}

/// # Safety
/// As [`decode`], for an item of its plan; nobody else uses the item's output rows or slot.
unsafe fn run_item<E: Element>(
    args: &DecodeCpu,
    output: &Output,
    item: &WorkItem,
    scratch: &mut Scratch,
) {
    let seq_len = (item.seq_len as usize).min(args.keys.capacity(&args.kv_cache));
    let q_len = item.q_len as usize;
    let unit = Unit {
        request: item.request as usize,
        kv_head: item.kv_head as usize,
        group: args.group,
        q_begin: item.q_begin as usize,
        q_len,
        first_row: item.row_begin as usize,
        rows: 0,
    }
    .clip(args.unit_rows);
    let Some(last_token) = unit.tokens().last().map(|(token, _)| token) else {
        return;
    };
    let keys = |token| keys_seen(args.causal, seq_len, q_len, token);
    let scale_log2 = (args.softmax_scale * std::f64::consts::LOG2_E) as f32;

    // SAFETY: the unit lies in q (caller's promise).
    unsafe { scratch.begin(&unit, args) };
    for tile in item.tile_begin as usize..item.tile_end as usize {
        let start = tile * TILE_TOKENS;
        // SAFETY: the item is one of the plan's, which was made for these keys (caller's promise).
        let (source, end) = unsafe { args.keys.of_tile(&args.kv_cache, item, start) };
        let end = end.min(keys(last_token));
        let len = end.saturating_sub(start).min(TILE_TOKENS);
        // SAFETY: request and KV head lie in table and cache (caller's promise).
        unsafe { scratch.tile.load(&source, start, len) };
        if scratch.tile.present > 0 {
            scratch.find_runs(&unit, |token| keys(token).saturating_sub(start).min(len));
            scratch.attend(scale_log2);
        }
    }
    for (row, acc) in scratch
        .acc
        .chunks_exact_mut(NOPE_DIM)
        .take(unit.rows)
        .enumerate()
    {
        let state = scratch.state[row];
        acc.iter_mut().for_each(|x| *x *= state.normaliser());
        match usize::try_from(item.slot) {
            // SAFETY: the row is this item's alone (caller's promise).
            Err(_) => unsafe {
                output.write_row::<E>(unit.index(row), acc, state.lse2());
                output.write_max(unit.index(row), state.max);
            },
            Ok(slot) => {
                let index = slot * args.unit_rows + row;
                // SAFETY: the slot is this item's alone (caller's promise), and inside (asserted).
                unsafe { write_partial(args, index, acc, state.lse2()) };
            }
        }
    }
}

/// # Safety
/// As [`decode`]; nobody else uses row `index` of the partial results.
unsafe fn write_partial(args: &DecodeCpu, index: usize, row: &[f32], lse2: f64) {
    let slots = args.partial_out.shape()[0].min(args.partial_lse.shape()[0]);
    assert!(
        index < slots,
        "the plan needs more partial rows than the {slots} given"
    );
    // SAFETY: the index was just checked, the rest is the caller's promise.
    unsafe {
        args.partial_out
            .row_mut([index], NOPE_DIM)
            .copy_from_slice(row);
        args.partial_lse.write([index], lse2 as f32);
    }
}
