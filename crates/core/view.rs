//! Views: how every array enters the crate, whoever owns it.

use std::ffi::c_void;
use std::fmt;

use crate::dtype::{DType, Device};
use crate::error::{Error, Result};

/// The most dimensions any operation takes.
pub const MAX_RANK: usize = 6;

/// Up to [`MAX_RANK`] numbers, inline. A longer list keeps its true length and its first numbers only, so
/// that the argument checks can refuse it by its rank.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    values: [i64; MAX_RANK],
    rank: usize,
}

impl Dims {
    /// Keeps these numbers.
    ///
    /// ```
    /// assert_eq!(&ferromla::Dims::new(&[2, 3])[..], &[2, 3]);
    /// ```
    pub fn new(numbers: &[i64]) -> Self {
        let mut values = [0; MAX_RANK];
        let kept = numbers.len().min(MAX_RANK);
        values[..kept].copy_from_slice(&numbers[..kept]);
        Self {
            values,
            rank: numbers.len(),
        }
    }

    /// How many numbers were given, those beyond [`MAX_RANK`] included.
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Row-major strides of this shape, in elements. Saturates instead of overflowing.
    ///
    /// ```
    /// assert_eq!(&ferromla::Dims::new(&[2, 3, 5]).contiguous_strides()[..], &[15, 5, 1]);
    /// ```
    pub fn contiguous_strides(&self) -> Self {
        let mut strides = *self;
        let mut step: i64 = 1;
        for (stride, &dim) in strides
            .values
            .iter_mut()
            .zip(&self.values)
            .take(self.rank.min(MAX_RANK))
            .rev()
        {
            *stride = step;
            step = step.saturating_mul(dim.max(1));
        }
        strides
    }
}

impl std::ops::Deref for Dims {
    type Target = [i64];

    fn deref(&self) -> &[i64] {
        &self.values[..self.rank.min(MAX_RANK)]
    }
}

impl fmt::Debug for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, value) in self.iter().enumerate() {
            write!(f, "{}{value}", if i == 0 { "" } else { ", " })?;
        }
        f.write_str(if self.rank > MAX_RANK { ", ...]" } else { "]" })
    }
}

/// A borrowed strided array: pointer, element type, device, shape and strides (in elements). It owns
/// nothing and is checked by the operation that receives it, not here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    ptr: u64,
    dtype: DType,
    device: Device,
    shape: Dims,
    strides: Dims,
}

impl View {
    /// A row-major view of host memory that an operation reads. `dtype` says what the numbers are: `u16` may be of
    /// any 16-bit type, `u8` of any 8-bit one.
    ///
    /// A view does not keep the borrow: that the memory is live is promised where the view is used, as [`View::new`]
    /// asks, and every operation that touches it is `unsafe` for that.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the shape is not within the slice or `dtype` has another size than `T`.
    ///
    /// ```
    /// use ferromla::{DType, View};
    /// let lens = [3i32, 5];
    /// assert_eq!(&View::of(&lens, DType::I32, &[2])?.shape()[..], &[2]);
    /// assert_eq!(View::of(&lens, DType::I32, &[3]).unwrap_err().argument(), Some("shape"));
    /// assert_eq!(View::of(&lens, DType::I64, &[2]).unwrap_err().argument(), Some("dtype"));
    /// # Ok::<(), ferromla::Error>(())
    /// ```
    pub fn of<T: Copy>(numbers: &[T], dtype: DType, shape: &[i64]) -> Result<Self> {
        within_slice::<T>(numbers.len(), dtype, shape)?;
        Ok(Self::on_host(numbers.as_ptr().cast(), dtype, shape))
    }

    /// The same of host memory that an operation writes: any bytes are to be a `T`, as they are a number.
    ///
    /// # Errors
    /// As [`View::of`].
    ///
    /// ```
    /// use ferromla::{DType, View};
    /// let mut lse = [0f32; 6];
    /// assert_eq!(&View::of_mut(&mut lse, DType::F32, &[2, 3])?.strides()[..], &[3, 1]);
    /// # Ok::<(), ferromla::Error>(())
    /// ```
    pub fn of_mut<T: Copy>(numbers: &mut [T], dtype: DType, shape: &[i64]) -> Result<Self> {
        within_slice::<T>(numbers.len(), dtype, shape)?;
        Ok(Self::on_host(numbers.as_mut_ptr().cast(), dtype, shape))
    }

    /// All bytes of this host memory as a `workspace`, whose alignment `u128`s have. As [`View::of_mut`].
    ///
    /// ```
    /// let mut memory = vec![0u128; 64];
    /// assert_eq!(&ferromla::View::workspace(&mut memory).shape()[..], &[1024]);
    /// ```
    pub fn workspace(memory: &mut [u128]) -> Self {
        let bytes = size_of_val(memory) as i64;
        Self::on_host(memory.as_mut_ptr().cast(), DType::U8, &[bytes])
    }

    fn on_host(ptr: *const c_void, dtype: DType, shape: &[i64]) -> Self {
        // SAFETY: whoever uses the view promises that the memory is live.
        unsafe { Self::contiguous(ptr, dtype, Device::Cpu, shape) }
    }

    /// Describes memory at `ptr`, which points at the element of index zero; of an output, it comes from a pointer
    /// that may write.
    ///
    /// # Safety
    /// While an operation that got this view runs (on CUDA: until the stream has passed it), every element
    /// that `shape` and `strides` reach from `ptr` is memory of `device` that may be read, and written if the
    /// view is an output. Shape and strides may be anything: the operation checks them.
    ///
    /// ```
    /// use ferromla::{DType, Device, View};
    /// let lens = [3i32, 5];
    /// // SAFETY: `lens` outlives the view.
    /// let view = unsafe { View::new(lens.as_ptr().cast(), DType::I32, Device::Cpu, &[2], &[1]) };
    /// assert_eq!(&view.shape()[..], &[2]);
    /// ```
    pub unsafe fn new(
        ptr: *const c_void,
        dtype: DType,
        device: Device,
        shape: &[i64],
        strides: &[i64],
    ) -> Self {
        Self {
            ptr: ptr as u64,
            dtype,
            device,
            shape: Dims::new(shape),
            strides: Dims::new(strides),
        }
    }

    /// [`View::new`] with row-major strides.
    ///
    /// # Safety
    /// As for [`View::new`].
    pub unsafe fn contiguous(
        ptr: *const c_void,
        dtype: DType,
        device: Device,
        shape: &[i64],
    ) -> Self {
        let shape = Dims::new(shape);
        Self {
            ptr: ptr as u64,
            dtype,
            device,
            shape,
            strides: shape.contiguous_strides(),
        }
    }

    /// A view of two dimensions with one of length 1 between them.
    pub(crate) fn with_middle_axis(&self) -> Self {
        let between = |dims: &Dims, middle| Dims::new(&[dims[0], middle, dims[1]]);
        let step = self.strides.first().copied().unwrap_or(0);
        if self.strides.rank() != 2 {
            return *self; // refused, as it has not one stride per dimension
        }
        Self {
            shape: between(&self.shape, 1),
            strides: between(&self.strides, step),
            ..*self
        }
    }

    /// Address of the element of index zero.
    pub const fn ptr(&self) -> u64 {
        self.ptr
    }

    /// Element type.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the memory is.
    pub const fn device(&self) -> Device {
        self.device
    }

    /// Lengths of the dimensions.
    pub const fn shape(&self) -> &Dims {
        &self.shape
    }

    /// Distances between neighbours along each dimension, in elements.
    pub const fn strides(&self) -> &Dims {
        &self.strides
    }
}

/// A row-major array of this shape lies within a slice of `len` elements `T`, each of which is a `dtype`.
pub(crate) fn within_slice<T>(len: usize, dtype: DType, shape: &[i64]) -> Result<()> {
    if dtype.size() != size_of::<T>() as u64 {
        let rule = format!("elements of the slice have {} bytes", size_of::<T>());
        return Err(Error::invalid("dtype", dtype, rule));
    }
    let elements = shape.iter().try_fold(1i64, |product, &dim| {
        product.checked_mul(dim).filter(|_| dim >= 0)
    });
    match elements {
        Some(elements) if elements as u64 <= len as u64 => Ok(()),
        _ => Err(Error::invalid(
            "shape",
            format!("{shape:?}"),
            format!("within a slice of {len} elements"),
        )),
    }
}

/// One tensor of full rows, or the latent part (512 wide) and the rotary part (64 wide) apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parts {
    /// Rows of `d_qk` numbers: 576 (latent, then rotary) or 512.
    One(View),
    /// `(nope [..., 512], pe [..., 64])`; together `d_qk` is 576.
    Two(View, View),
}

impl From<View> for Parts {
    fn from(view: View) -> Self {
        Self::One(view)
    }
}

impl From<(View, View)> for Parts {
    fn from((nope, rope): (View, View)) -> Self {
        Self::Two(nope, rope)
    }
}

/// A CUDA stream to launch on, by its `CUstream` handle: borrowed, never destroyed, and live while an operation that
/// got it runs. 0 is the default stream. The CPU backend ignores it and returns when the work is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stream(pub u64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_beyond_the_slice_and_another_size_of_elements_are_refused() {
        let refused = |len, dtype, shape: &[i64]| {
            let error = within_slice::<u16>(len, dtype, shape).unwrap_err();
            error.argument().unwrap()
        };
        assert!(within_slice::<u16>(12, DType::Bf16, &[3, 4]).is_ok());
        assert_eq!(refused(11, DType::Bf16, &[3, 4]), "shape");
        assert_eq!(refused(12, DType::Bf16, &[-3, -4]), "shape");
        assert_eq!(refused(12, DType::Bf16, &[i64::MAX, 4]), "shape");
        assert_eq!(refused(12, DType::F32, &[3]), "dtype");
    }
}
