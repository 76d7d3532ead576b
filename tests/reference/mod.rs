//! Random paged workloads and what attention over them is, in float64.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod memory;
pub mod server;

/// Round to nearest bfloat16.
pub fn bf16(x: f32) -> u16 {
    half::bf16::from_f32(x).to_bits()
}

pub fn from_bf16(bits: u16) -> f64 {
    half::bf16::from_bits(bits).to_f64()
}

/// A small generator of its own, so that a failure comes again.
struct Random(u64);

impl Random {
    /// xorshift64*.
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// About normal with this deviation, rounded to bfloat16 so that both sides see the same number.
    fn normal(&mut self, deviation: f32) -> f32 {
        let sum: f32 = (0..4)
            .map(|_| (self.next() >> 40) as f32 / (1 << 24) as f32)
            .sum();
        half::bf16::from_f32((sum - 2.0) * 3f32.sqrt() * deviation).to_f32()
    }
}

/// With weights and results rounded to bfloat16, an element of `out` may be off by 2^-8 of the largest value it
/// averages: the absolute tolerance of 8e-4 is meant for cached rows of about this size.
const KEY_DEVIATION: f32 = 0.1;
/// Scores then have a deviation of 0.3, and sums of 576 terms a float32 error below the 1e-6 that `lse` may be off.
const QUERY_DEVIATION: f32 = 3.0;

/// Requests over a paged cache of one KV head and rows of 576.
pub struct Workload {
    pub batch: usize,
    /// Query tokens of each request.
    pub q_lens: Vec<usize>,
    pub heads: usize,
    pub page_size: usize,
    pub num_pages: usize,
    pub max_pages: usize,
    pub causal: bool,
    pub seq_lens: Vec<i32>,
    pub block_table: Vec<i32>,
    /// `[tokens, heads, 576]`: one request's query tokens after the other's.
    pub q: Vec<f32>,
    /// Per request its tokens' rows of 576.
    pub keys: Vec<Vec<Vec<f32>>>,
}

impl Workload {
    /// Six requests, one of them empty, in shuffled pages; what the tables do not use is out of range.
    pub fn new(q_len: usize, page_size: usize) -> Self {
        Self::of(vec![q_len; 6], page_size)
    }

    /// The same requests with as many query tokens each: none, more than cached tokens, several units' worth.
    pub fn ragged(page_size: usize) -> Self {
        Self::of(vec![9, 2, 3, 0, 40, 1], page_size)
    }

    fn of(q_lens: Vec<usize>, page_size: usize) -> Self {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let seq_lens = vec![700i32, 0, 1, 129, 64, 333];
        let (batch, heads) = (seq_lens.len(), 16);
        let max_pages = 700usize.div_ceil(page_size) + 2;
        let pages = |len: i32| (len as usize).div_ceil(page_size);
        let num_pages = seq_lens.iter().map(|&len| pages(len)).sum::<usize>() + 3;
        let mut free: Vec<i32> = (0..num_pages as i32).collect();
        for i in (1..free.len()).rev() {
            free.swap(i, (random.next() % (i as u64 + 1)) as usize);
        }
        let mut block_table = vec![2_147_480_000; batch * max_pages];
        for (request, &len) in seq_lens.iter().enumerate() {
            for column in 0..pages(len) {
                block_table[request * max_pages + column] = free.pop().unwrap();
            }
        }
        let q = (0..q_lens.iter().sum::<usize>() * heads * 576)
            .map(|_| random.normal(QUERY_DEVIATION))
            .collect();
        let mut row = || {
            (0..576)
                .map(|_| random.normal(KEY_DEVIATION))
                .collect::<Vec<f32>>()
        };
        let keys = seq_lens
            .iter()
            .map(|&len| (0..len).map(|_| row()).collect())
            .collect();
        Self {
            batch,
            q_lens,
            heads,
            page_size,
            num_pages,
            max_pages,
            causal: true,
            seq_lens,
            block_table,
            q,
            keys,
        }
    }

    /// Where a token is in the cache.
    pub fn slot(&self, request: usize, token: usize) -> i64 {
        let page = self.block_table[request * self.max_pages + token / self.page_size] as usize;
        (page * self.page_size + token % self.page_size) as i64
    }

    /// Query tokens of all requests.
    pub fn tokens(&self) -> usize {
        self.q_lens.iter().sum()
    }

    /// Where each request's query tokens begin, and where the last one's end.
    pub fn qo_indptr(&self) -> Vec<i32> {
        let mut end = 0;
        let ends = self.q_lens.iter().map(|len| {
            end += *len as i32;
            end
        });
        std::iter::once(0).chain(ends).collect()
    }

    /// `out [rows, 512]` and `lse [rows]` where the requests have these lengths, of those they were given.
    pub fn attend(&self, seq_lens: &[i32]) -> (Vec<f64>, Vec<f64>) {
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        let mut rows = self.q.chunks_exact(576);
        for (request, &q_len) in self.q_lens.iter().enumerate() {
            let len = seq_lens[request] as usize;
            for token in 0..q_len {
                let seen = if self.causal {
                    (len + token + 1).saturating_sub(q_len).min(len)
                } else {
                    len
                };
                for q in rows.by_ref().take(self.heads) {
                    let (row_out, row_lse) = attend_row(q, &self.keys[request][..seen]);
                    out.extend(row_out);
                    lse.push(row_lse);
                }
            }
        }
        (out, lse)
    }
}

fn attend_row(q: &[f32], keys: &[Vec<f32>]) -> (Vec<f64>, f64) {
    let dot = |key: &Vec<f32>| {
        q.iter()
            .zip(key)
            .map(|(&a, &b)| f64::from(a) * f64::from(b))
            .sum::<f64>()
    };
    let scores: Vec<f64> = keys.iter().map(|key| dot(key) / 24.0).collect(); // 576 ** -0.5
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
    let mut out = vec![0.0; 512];
    for (score, key) in scores.iter().zip(keys) {
        let p = (score - max).exp() / sum;
        out.iter_mut()
            .zip(key)
            .for_each(|(o, &v)| *o += p * f64::from(v));
    }
    (
        out,
        if keys.is_empty() {
            f64::NEG_INFINITY
        } else {
            max + sum.ln()
        },
    )
}

/// The tolerances that every backend keeps: 8e-4 or 2.01/128 relative per element and 5e-6 as a whole for
/// `out`; 1e-6 or 8.01/65536 relative for `lse`.
pub fn close((out, lse): &(Vec<f64>, Vec<f64>), got_out: &[f64], got_lse: &[f32], what: &str) {
    let (mut product, mut squares) = (0.0, 0.0);
    for (i, (x, y)) in out.iter().zip(got_out).enumerate() {
        let error = (x - y).abs();
        let place = [i / 512, i % 512];
        assert!(
            error <= 8e-4 || error <= 2.01 / 128.0 * x.abs(),
            "{what}: out{place:?} is {y}, not {x}"
        );
        product += x * y;
        squares += x * x + y * y;
    }
    assert!(
        1.0 - 2.0 * product / squares <= 5e-6,
        "{what}: out as a whole"
    );
    for (i, (x, &y)) in lse.iter().zip(got_lse).enumerate() {
        let y = f64::from(y);
        let same = x == &y || (x - y).abs() <= f64::max(1e-6, 8.01 / 65536.0 * x.abs());
        assert!(same, "{what}: lse[{i}] is {y}, not {x}");
    }
}
