//! Views of cudarc's slices and streams, as a caller has them who holds all memory by cudarc.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use ferromla::cudarc_safe::{read, write};
use ferromla::{DType, Device, MergeArgs, Stream, merge_states};

const ROWS: i64 = 3;
const ONE: u16 = 0x3f80;
const TWO: u16 = 0x4000;

/// Sums of keys' values, all this number, and their log-sum-exps.
struct Side {
    out: CudaSlice<u16>,
    lse: CudaSlice<f32>,
}

impl Side {
    fn new(stream: &Arc<CudaStream>, number: u16, lse: f32) -> Self {
        Self {
            out: stream.clone_htod(&[number; 512 * ROWS as usize]).unwrap(),
            lse: stream.clone_htod(&[lse; ROWS as usize]).unwrap(),
        }
    }
}

fn merge(stream: &CudaStream, a: &Side, b: &Side, to: &mut Side) {
    let (shape, scalars) = (&[ROWS, 512], &[ROWS]);
    let out_a = read(&a.out, DType::Bf16, shape, stream).unwrap();
    let lse_a = read(&a.lse, DType::F32, scalars, stream).unwrap();
    let out_b = read(&b.out, DType::Bf16, shape, stream).unwrap();
    let lse_b = read(&b.lse, DType::F32, scalars, stream).unwrap();
    let out = write(&mut to.out, DType::Bf16, shape, stream).unwrap();
    let lse = write(&mut to.lse, DType::F32, scalars, stream).unwrap();
    let args = MergeArgs {
        out_a: out_a.view(),
        lse_a: lse_a.view(),
        out_b: out_b.view(),
        lse_b: lse_b.view(),
        out: out.view(),
        lse: lse.view(),
        stream: stream.into(),
    };
    // SAFETY: the views are of slices that are borrowed until after the call.
    unsafe { merge_states(&args).unwrap() };
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn an_operation_reads_and_writes_slices() {
    let context = CudaContext::new(0).unwrap();
    let stream = context.default_stream();
    let a = Side::new(&stream, ONE, 0.5);
    let b = Side::new(&stream, TWO, f32::NEG_INFINITY);
    let mut merged = Side::new(&stream, 0x7fff, f32::NAN);
    merge(&stream, &a, &b, &mut merged);
    let out = stream.clone_dtoh(&merged.out).unwrap();
    let lse = stream.clone_dtoh(&merged.lse).unwrap();
    assert!(out.iter().all(|&x| x == ONE));
    assert_eq!(lse, [0.5; ROWS as usize]);
}

#[test]
#[ignore = "needs a Hopper GPU"]
fn a_view_is_of_the_slice_s_memory_on_its_device() {
    let context = CudaContext::new(0).unwrap();
    let stream = context.default_stream();
    assert_eq!(Stream::from(&*stream), Stream::default());
    let mut slice = stream.clone_htod(&[1f32, 2.0, 3.0, 4.0]).unwrap();
    let whole = read(&slice, DType::F32, &[2, 2], &stream).unwrap().view();
    assert_eq!(whole.device(), Device::Cuda(0));
    assert_eq!(
        (&whole.shape()[..], &whole.strides()[..]),
        (&[2, 2][..], &[2, 1][..])
    );
    let end = read(&slice.slice(2..), DType::F32, &[2], &stream)
        .unwrap()
        .view();
    assert_eq!(end.ptr(), whole.ptr() + 8);
    let error = write(&mut slice, DType::F32, &[5], &stream).unwrap_err();
    assert_eq!(error.argument(), Some("shape"));
}
