//! One decode problem: its inputs, how to run it, and what came out.

use ferromla_cpu::{CacheCpu, DecodeCpu, Format, KeysCpu, QueryScale, decode};
use ferromla_schedule::{Keys, PlanView, Problem, Queries, Split, Target, layout, plan_into};

use super::arrays::{Held, Rows, indices};
use super::{NAN_BITS, Rng, from_bits, to_bits};

/// What an unused entry of the block table holds.
pub const UNUSED_PAGE: i32 = 2_147_480_000;

#[derive(Debug, Clone)]
pub struct Case {
    pub seq_lens: Vec<i32>,
    pub s_q: usize,
    pub h: usize,
    pub h_kv: usize,
    pub page_size: usize,
    pub width: usize,
    pub format: Format,
    pub causal: bool,
    pub sink: Option<Vec<f32>>,
    pub split: Split,
    pub threads: i32,
    pub strided: bool,
    pub two_part: bool,
    pub scale: f64,
    pub seed: u64,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            seq_lens: vec![140],
            s_q: 1,
            h: 16,
            h_kv: 1,
            page_size: 64,
            width: 576,
            format: Format::Bf16,
            causal: true,
            sink: None,
            split: Split::Auto,
            threads: 2,
            strided: false,
            two_part: false,
            scale: 576f64.powf(-0.5),
            seed: 1,
        }
    }
}

/// The values of a case, as numbers for the reference and in memory for the backend.
pub struct Inputs {
    pub case: Case,
    /// `[b, s_q, h]` rows.
    pub q: Held<3>,
    /// `[pages, page_size, h_kv]` rows, NaN where no request has a token.
    pub cache: Held<3>,
    /// `[b, max_pages]`
    pub table: Rows<i32, 2>,
}

pub struct Outputs {
    pub out: Rows<u16, 3>,
    pub lse: Rows<f32, 3>,
}

impl Inputs {
    /// Random normal values; every request's tokens in shuffled pages.
    pub fn new(case: &Case) -> Self {
        let mut rng = Rng(case.seed);
        let b = case.seq_lens.len();
        let pages_of = |len: i32| (len.max(0) as usize).div_ceil(case.page_size);
        let used: usize = case.seq_lens.iter().map(|len| pages_of(*len)).sum();
        let max_pages = case
            .seq_lens
            .iter()
            .map(|len| pages_of(*len))
            .max()
            .unwrap_or(0)
            + 1;
        let mut layout_rng = case.strided.then_some(Rng(case.seed ^ 0xabcd));
        let mut held =
            |shape, two| Held::new(shape, case.width, two, NAN_BITS, layout_rng.as_mut());
        let q = held([b, case.s_q, case.h], case.two_part);
        let cache = held([used + 2, case.page_size, case.h_kv], case.two_part);
        let table = Rows::new([b, max_pages], 1, UNUSED_PAGE, layout_rng.as_mut());
        let mut inputs = Self {
            case: case.clone(),
            q,
            cache,
            table,
        };
        inputs.fill(&mut rng, used + 2);
        inputs
    }

    fn fill(&mut self, rng: &mut Rng, pages: usize) {
        let case = self.case.clone();
        for index in indices([case.seq_lens.len(), case.s_q, case.h]) {
            self.q.set_row(index, &random_row(&case, rng));
        }
        let mut free: Vec<i32> = (0..pages as i32).collect();
        rng.shuffle(&mut free);
        for (request, len) in case.seq_lens.iter().enumerate() {
            for position in 0..(*len).max(0) as usize {
                let (column, offset) = (position / case.page_size, position % case.page_size);
                if offset == 0 {
                    self.table
                        .set_row([request, column], &[free.pop().unwrap()]);
                }
                let page = self.table.row([request, column])[0] as usize;
                for head in 0..case.h_kv {
                    self.cache
                        .set_row([page, offset, head], &random_row(&case, rng));
                }
            }
        }
    }

    /// Where a token lies in the cache.
    pub fn slot(&self, request: usize, position: usize) -> [usize; 3] {
        let column = position / self.case.page_size;
        let page = self.table.row([request, column])[0] as usize;
        [page, position % self.case.page_size, 0]
    }

    pub fn cache_pages(&self) -> i32 {
        match &self.cache {
            Held::One(rows) | Held::Two(rows, _) => rows.shape[0] as i32,
        }
    }

    /// Overwrites a token in every KV head.
    pub fn set_token(&mut self, request: usize, position: usize, row: &[f32]) {
        let bits: Vec<u16> = row.iter().map(|x| to_bits(self.case.format, *x)).collect();
        let [page, offset, _] = self.slot(request, position);
        for head in 0..self.case.h_kv {
            self.cache.set_row([page, offset, head], &bits);
        }
    }

    /// Overwrites all rows of q.
    pub fn set_q(&mut self, row: &[f32]) {
        let bits: Vec<u16> = row.iter().map(|x| to_bits(self.case.format, *x)).collect();
        for index in indices([self.case.seq_lens.len(), self.case.s_q, self.case.h]) {
            self.q.set_row(index, &bits);
        }
    }

    pub fn run(&mut self) -> Outputs {
        let lens = self.case.seq_lens.clone();
        self.run_with_lens(&lens)
    }

    /// Runs with lengths other than the cache was filled for.
    pub fn run_with_lens(&mut self, seq_lens: &[i32]) -> Outputs {
        let case = self.case.clone();
        let shape = Problem {
            batch: seq_lens.len() as i32,
            queries: Queries::Uniform {
                q_len: case.s_q as i32,
            },
            group: (case.h / case.h_kv) as i32,
            kv_heads: case.h_kv as i32,
            keys: Keys::Pages,
            causal: case.causal,
            max_seq_len: (self.table.shape[1] * case.page_size) as i32,
            split: case.split,
            target: Target::Cpu {
                threads: case.threads,
            },
        }
        .shape()
        .unwrap();
        let plan_layout = layout(&shape).unwrap();
        let mut words = vec![-1; plan_layout.words()];
        plan_into(&shape, seq_lens, None, &mut words).unwrap();

        let rows = [seq_lens.len(), case.s_q, case.h];
        let mut layout_rng = case.strided.then_some(Rng(case.seed ^ 0x1234));
        let mut out = Rows::new(rows, 512, 0xbeef, layout_rng.as_mut());
        let mut lse = Rows::new(rows, 1, 777.0, layout_rng.as_mut());
        let slots = [plan_layout.max_slots as usize * shape.unit_rows as usize];
        let mut partial_out = Rows::new(slots, 512, f32::NAN, None);
        let mut partial_lse = Rows::new(slots, 1, f32::NAN, None);
        let sink = case
            .sink
            .as_ref()
            .map(|sink| ferromla_cpu::Strided::new(sink.as_ptr(), [sink.len()], [1]));
        let args = DecodeCpu {
            format: case.format,
            q: self.q.rows(case.format),
            q_scale: QueryScale::One(1.0),
            kv_cache: CacheCpu::Plain(self.cache.rows(case.format)),
            keys: KeysCpu::Pages {
                block_table: self.table.view(0),
            },
            group: case.h / case.h_kv,
            causal: case.causal,
            softmax_scale: case.scale,
            attn_sink: sink,
            plan: PlanView::new(&shape, &words).unwrap(),
            unit_rows: shape.unit_rows as usize,
            out: out.view_mut(0),
            lse: lse.view_mut(0),
            empty_lse: f32::NEG_INFINITY,
            max_logits: None,
            partial_out: partial_out.view_mut(0),
            partial_lse: partial_lse.view_mut(0),
        };
        // SAFETY: every view describes one of the arrays above, shaped alike; the plan is this case's.
        unsafe { decode(&args) };
        out.assert_gaps_untouched();
        lse.assert_gaps_untouched();
        Outputs { out, lse }
    }
}

impl Outputs {
    /// The bits of one request's results.
    pub fn request(&self, request: usize) -> (Vec<u16>, Vec<u32>) {
        let [_, s_q, h] = self.out.shape;
        let rows = || indices([s_q, h]).map(|[t, h]| [request, t, h]);
        let out = rows()
            .flat_map(|index| self.out.row(index).to_vec())
            .collect();
        let lse = rows()
            .map(|index| self.lse.row(index)[0].to_bits())
            .collect();
        (out, lse)
    }

    pub fn out_row(&self, format: Format, index: [usize; 3]) -> Vec<f32> {
        self.out
            .row(index)
            .iter()
            .map(|bits| from_bits(format, *bits))
            .collect()
    }
}

fn random_row(case: &Case, rng: &mut Rng) -> Vec<u16> {
    (0..case.width)
        .map(|_| to_bits(case.format, rng.normal()))
        .collect()
}
