//! Sparse batches to plan for, and the dense batch that each must be planned as.

use ferromla_schedule::{ListLens, PlanShape, layout, plan_sparse_into};
use proptest::prelude::*;

use super::{Case, Planned, equal_or_empty, uniform_cases};

/// Lengths of the lists: `[batch, token]`, strided; a stride of 0 gives all the same.
#[derive(Debug, Clone)]
pub struct Lens {
    pub data: Vec<i32>,
    pub stride: [usize; 2],
}

impl Lens {
    fn view(&self) -> ListLens<'_> {
        ListLens {
            data: &self.data,
            stride: self.stride,
        }
    }

    fn at(lens: &Option<Self>, request: usize, token: usize, most: i32) -> i32 {
        let value = lens
            .as_ref()
            .map(|lens| lens.data[request * lens.stride[0] + token * lens.stride[1]]);
        value.map_or(most, |value| value.clamp(0, most))
    }
}

#[derive(Debug, Clone)]
pub struct SparseCase {
    pub shape: PlanShape,
    pub topk_lengths: Option<Lens>,
    pub extra_lengths: Option<Lens>,
}

impl SparseCase {
    /// `main_len` and where the keys end, of each token in turn.
    pub fn keys(&self) -> Vec<(i32, i32)> {
        let tokens =
            |request| (0..self.shape.sparse_q_len as usize).map(move |token| (request, token));
        (0..self.shape.batch as usize)
            .flat_map(tokens)
            .map(|(request, token)| {
                let main = Lens::at(&self.topk_lengths, request, token, self.shape.topk);
                let extra = Lens::at(&self.extra_lengths, request, token, self.shape.extra_topk);
                let rounded_up = (main + 63) / 64 * 64;
                (main, if extra > 0 { rounded_up + extra } else { main })
            })
            .collect()
    }

    /// Every token a request of its own, whose keys are a sequence.
    pub fn as_dense(&self) -> Case {
        let shape = PlanShape {
            batch: self.shape.batch * self.shape.sparse_q_len,
            sparse_q_len: 0,
            topk: 0,
            extra_topk: 0,
            ..self.shape
        };
        let seq_lens = self.keys().into_iter().map(|(_, end)| end).collect();
        Case {
            shape,
            seq_lens,
            qo_indptr: Vec::new(),
        }
    }
}

pub fn plan_sparse(case: &SparseCase) -> Planned {
    let layout = layout(&case.shape).expect("cases are valid");
    let mut words = vec![0x5a5a_5a5a; layout.words()];
    let topk_lengths = case.topk_lengths.as_ref().map(Lens::view);
    let extra_lengths = case.extra_lengths.as_ref().map(Lens::view);
    let header = plan_sparse_into(&case.shape, topk_lengths, extra_lengths, &mut words)
        .expect("cases are valid");
    Planned {
        shape: case.shape,
        layout,
        header,
        words,
    }
}

/// The shape with these lists; `of` decides all the rest.
pub fn sparse_shape(of: PlanShape, sparse_q_len: i32, topk: i32, extra_topk: i32) -> PlanShape {
    let rounded_up = (topk + 63) / 64 * 64;
    PlanShape {
        q_len: 1,
        causal: 0,
        sparse_q_len,
        topk,
        extra_topk,
        max_seq_len: if extra_topk > 0 {
            rounded_up + extra_topk
        } else {
            topk
        },
        ..of
    }
}

/// Any small sparse batch, with lengths of every kind up to the limits of `i32`.
pub fn sparse_cases() -> impl Strategy<Value = SparseCase> {
    let topk = || prop_oneof![1 => Just(0), 3 => 1..700i32, 3 => Just(2048), 1 => Just(40_000)];
    let sparse_q_len = prop_oneof![3 => Just(1), 3 => 2..5i32, 1 => 5..40i32];
    (uniform_cases(), sparse_q_len, topk(), topk()).prop_flat_map(
        |(dense, q_len, topk, extra_topk)| {
            let shape = sparse_shape(dense.shape, q_len, topk, extra_topk);
            let lens = || lens(shape.batch as usize, q_len as usize);
            (lens(), lens()).prop_map(move |(topk_lengths, extra_lengths)| SparseCase {
                shape,
                topk_lengths,
                extra_lengths,
            })
        },
    )
}

/// None, per request, per token, per token with a stride, or one for all.
fn lens(batch: usize, q_len: usize) -> impl Strategy<Value = Option<Lens>> {
    let value = prop_oneof![2 => Just(0), 6 => 0..900i32, 2 => 0..5000i32, 1 => any::<i32>()];
    let stride = prop::sample::select(vec![[1, 0], [q_len, 1], [3 * q_len, 3], [1, batch], [0, 0]]);
    let lens = stride.prop_flat_map(move |stride| {
        let last = batch.max(1) * stride[0].max(1) + q_len * stride[1];
        let any = prop::collection::vec(value.clone(), last + 1);
        prop_oneof![4 => any.boxed(), 1 => equal_or_empty(last + 1).boxed()]
            .prop_map(move |data| Some(Lens { data, stride }))
    });
    prop_oneof![1 => Just(None), 4 => lens]
}
