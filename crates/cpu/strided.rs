//! A pointer with a shape and strides: how arrays reach this backend.

/// An array of `D` indexed dimensions over memory this crate does not own.
///
/// Each index names one element, or the first of a row of consecutive elements where an operation says
/// so (the latent of a token, say): such rows have unit stride, the dimensions before them any.
/// Strides count elements, may be negative and need no alignment beyond that of `T`.
///
/// Making a view is safe, because only the operations read through it; their `# Safety` sections say
/// what must then hold.
///
/// ```
/// use ferromla_cpu::Strided;
/// let data = [0.0f32; 6];
/// let columns = Strided::new(data.as_ptr(), [3, 2], [1, 3]);
/// assert_eq!(columns.shape(), [3, 2]);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Strided<T, const D: usize> {
    ptr: *const T,
    shape: [usize; D],
    strides: [i64; D],
}

// SAFETY: a view is a description. Only the `unsafe` operations read or write through it, and their
// contracts cover every thread they use.
unsafe impl<T: Send + Sync, const D: usize> Send for Strided<T, D> {}
// SAFETY: as for `Send`.
unsafe impl<T: Send + Sync, const D: usize> Sync for Strided<T, D> {}

impl<T, const D: usize> Strided<T, D> {
    /// Describes memory; `ptr` must come from a `*mut T` where the operation writes.
    pub const fn new(ptr: *const T, shape: [usize; D], strides: [i64; D]) -> Self {
        Self {
            ptr,
            shape,
            strides,
        }
    }

    /// The indexed extents.
    pub const fn shape(&self) -> [usize; D] {
        self.shape
    }

    /// Elements from one index to the next.
    pub(crate) const fn strides(&self) -> [i64; D] {
        self.strides
    }

    /// # Safety
    /// `index` lies in the shape and the described memory is live.
    pub(crate) unsafe fn at(&self, index: [usize; D]) -> *const T {
        let mut offset = 0;
        for ((i, extent), stride) in index.iter().zip(self.shape).zip(self.strides) {
            debug_assert!(*i < extent, "index {index:?} outside {:?}", self.shape);
            offset += *i as i64 * stride;
        }
        // SAFETY: the element lies in the described memory (this function's contract).
        unsafe { self.ptr.offset(offset as isize) }
    }

    /// # Safety
    /// As [`Strided::at`]; nobody writes the element meanwhile.
    pub(crate) unsafe fn read(&self, index: [usize; D]) -> T
    where
        T: Copy,
    {
        // SAFETY: the caller's promise.
        unsafe { self.at(index).read() }
    }

    /// # Safety
    /// As [`Strided::at`]; the memory is writable and nobody else uses the element meanwhile.
    pub(crate) unsafe fn write(&self, index: [usize; D], value: T) {
        // SAFETY: the caller's promise.
        unsafe { self.at(index).cast_mut().write(value) }
    }

    /// The `len` consecutive elements that start at `index`.
    ///
    /// # Safety
    /// As [`Strided::at`] for all of them; nobody writes them during `'a`.
    pub(crate) unsafe fn row<'a>(&self, index: [usize; D], len: usize) -> &'a [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.at(index), len) }
    }

    /// The `len` consecutive elements that start at `index`, to write.
    ///
    /// # Safety
    /// As [`Strided::row`]; the memory is writable and nobody else uses these elements during `'a`.
    pub(crate) unsafe fn row_mut<'a>(&self, index: [usize; D], len: usize) -> &'a mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.at(index).cast_mut(), len) }
    }
}

/// Rows in two parts: the latent ("nope", 512 wide) and the rotary ("rope", 64 wide, absent where
/// `d_qk` is 512). One 576-wide tensor is the case where both views have the same strides and the
/// second starts 512 elements later.
#[derive(Debug, Clone, Copy)]
pub struct Parts<const D: usize, T = u16> {
    /// Rows of [`NOPE_DIM`](crate::NOPE_DIM) elements, 16-bit ones as their bits.
    pub nope: Strided<T, D>,
    /// Rows of [`ROPE_DIM`](crate::ROPE_DIM) elements.
    pub rope: Option<Strided<T, D>>,
}
