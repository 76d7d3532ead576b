//! float32 matrix products over slices: a checked door to `matrixmultiply`.

/// A matrix inside a slice.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub data: &'a [f32],
    pub rows: usize,
    pub cols: usize,
    pub row_stride: usize,
    pub col_stride: usize,
}

impl Matrix<'_> {
    fn assert_inside(&self) {
        if self.rows > 0 && self.cols > 0 {
            let last = (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride;
            assert!(last < self.data.len(), "matrix reaches past its slice");
        }
    }
}

/// `c = a b`, or `c += a b` when `accumulate`; rows of `c` are `c_row_stride` apart and dense.
pub(crate) fn multiply(a: Matrix, b: Matrix, c: &mut [f32], c_row_stride: usize, accumulate: bool) {
    assert_eq!(a.cols, b.rows);
    assert!(b.cols <= c_row_stride);
    a.assert_inside();
    b.assert_inside();
    if a.rows == 0 || b.cols == 0 {
        return;
    }
    assert!(
        (a.rows - 1) * c_row_stride + b.cols <= c.len(),
        "product reaches past its slice"
    );
    let beta = if accumulate { 1.0 } else { 0.0 };
    // SAFETY: all three matrices lie in their slices (asserted above), `c` is borrowed mutably and so
    // overlaps neither `a` nor `b`, and its rows do not overlap each other.
    unsafe {
        matrixmultiply::sgemm(
            a.rows,
            a.cols,
            b.cols,
            1.0,
            a.data.as_ptr(),
            a.row_stride as isize,
            a.col_stride as isize,
            b.data.as_ptr(),
            b.row_stride as isize,
            b.col_stride as isize,
            beta,
            c.as_mut_ptr(),
            c_row_stride as isize,
            1,
        );
    }
}
