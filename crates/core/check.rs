//! The rules every array argument is held to, one function per rule.
//!
//! The operations' own files (`check_decode.rs` and its neighbours) say which rules an argument has; here is
//! how a rule is checked and how its error reads. Nothing here touches the memory a view describes.

use std::fmt::Display;
use std::ops::Range;

use crate::dtype::{DType, Device};
use crate::error::{Error, Result};
use crate::problem::Strided;
use crate::view::{MAX_RANK, View};

/// Alignment of rows that CUDA kernels load, in bytes.
pub(crate) const CUDA_ROW_ALIGNMENT: u64 = 16;
/// Longest sequence: whole tiles below int32's bound.
pub(crate) const MAX_SEQ_LEN: i64 = i32::MAX as i64 / 64 * 64;

/// What an operation does with an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// How the last dimension of an argument is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Last {
    /// Rows of consecutive elements; on CUDA each begins on a 16-byte boundary.
    Rows,
    /// Consecutive elements, read one by one.
    Unit,
    /// Elements at any distance.
    Any,
}

/// An array argument and its name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arg<'a> {
    pub name: &'static str,
    pub view: &'a View,
}

impl<'a> Arg<'a> {
    pub fn new(name: &'static str, view: &'a View) -> Self {
        Self { name, view }
    }

    pub fn shape(&self) -> &'a [i64] {
        self.view.shape()
    }

    fn shape_error(&self, rule: impl ToString) -> Error {
        Error::invalid(self.name, format!("of shape {}", self.view.shape()), rule)
    }

    /// The shape has one of these ranks and sizes that int32 counts.
    pub fn rank(&self, allowed: &[usize], layout: impl Display) -> Result<&'a [i64]> {
        let rank = self.view.shape().rank();
        if !allowed.contains(&rank) || rank > MAX_RANK {
            return Err(self.shape_error(format!("the shape is {layout}, its rank is {rank}")));
        }
        if self.view.strides().rank() != rank {
            let value = format!(
                "of shape {} with strides {}",
                self.view.shape(),
                self.view.strides()
            );
            return Err(Error::invalid(self.name, value, "one stride per dimension"));
        }
        for (axis, &dim) in self.shape().iter().enumerate() {
            if !(0..=i64::from(i32::MAX)).contains(&dim) {
                return Err(
                    self.shape_error(format!("dimension {axis} is between 0 and {}", i32::MAX))
                );
            }
        }
        Ok(self.shape())
    }

    /// Dimension `axis` has this size; `what` says where the size comes from.
    pub fn dim(&self, axis: usize, expected: i64, what: impl Display) -> Result<()> {
        if self.shape()[axis] == expected {
            return Ok(());
        }
        Err(self.shape_error(format!("dimension {axis} is {expected}, {what}")))
    }

    /// The shape is exactly this.
    pub fn exactly(&self, expected: &[i64], what: impl Display) -> Result<()> {
        self.rank(&[expected.len()], &what)?;
        (0..expected.len())
            .try_for_each(|axis| self.dim(axis, expected[axis], format_args!("as in {what}")))
    }

    /// The element type is one of these.
    pub fn dtype(&self, allowed: &[DType], why: impl Display) -> Result<DType> {
        let dtype = self.view.dtype();
        if allowed.contains(&dtype) {
            return Ok(dtype);
        }
        let names: Vec<_> = allowed.iter().map(|dtype| dtype.name()).collect();
        Err(Error::invalid(
            self.name,
            dtype,
            format!("the type is {}{why}", names.join(" or ")),
        ))
    }

    /// The memory is on this device, that of the argument `like`.
    pub fn device(&self, device: Device, like: &str) -> Result<()> {
        if self.view.device() == device {
            return Ok(());
        }
        let rule = format!("it is on {device}, as {like} is");
        Err(Error::invalid(
            self.name,
            format!("on {}", self.view.device()),
            rule,
        ))
    }

    /// Pointer, alignment, strides and extent allow the access.
    pub fn memory(&self, last: Last, access: Access) -> Result<()> {
        if self.shape().contains(&0) {
            return Ok(());
        }
        self.pointer()?;
        self.extent()?;
        if last != Last::Any {
            self.unit_last_stride()?;
        }
        if last == Last::Rows && self.view.device().is_cuda() {
            self.aligned_rows()?;
        }
        if access == Access::Write {
            self.distinct_elements()?;
        }
        Ok(())
    }

    fn pointer(&self) -> Result<()> {
        let (ptr, size) = (self.view.ptr(), self.view.dtype().size());
        if ptr == 0 {
            return Err(self.shape_error("the pointer is null, which only an empty array may have"));
        }
        if !ptr.is_multiple_of(size) {
            let rule = format!("a {} lies on a {size}-byte boundary", self.view.dtype());
            return Err(Error::invalid(
                self.name,
                format!("at address {ptr:#x}"),
                rule,
            ));
        }
        Ok(())
    }

    /// Every element has an address.
    fn extent(&self) -> Result<()> {
        if self.addresses_fit() == Some(true) {
            return Ok(());
        }
        let value = format!(
            "of shape {} with strides {}",
            self.view.shape(),
            self.view.strides()
        );
        Err(Error::invalid(
            self.name,
            value,
            "every element has an address below 2^63",
        ))
    }

    /// Whether the lowest address and the one past the highest are both within `0 ..= i64::MAX`; `None`: no.
    fn addresses_fit(&self) -> Option<bool> {
        let size = self.view.dtype().size() as i64;
        let mut low = i64::try_from(self.view.ptr()).ok()?;
        let mut high = low.checked_add(size)?;
        for (&dim, &stride) in self.shape().iter().zip(&self.view.strides()[..]) {
            let reach = (dim - 1).checked_mul(stride)?.checked_mul(size)?;
            let end = if reach < 0 { &mut low } else { &mut high };
            *end = end.checked_add(reach)?;
        }
        Some(low >= 0)
    }

    pub fn stride_error(&self, axis: usize, rule: impl ToString) -> Error {
        let value = format!(
            "of shape {} with stride {} along dimension {axis}",
            self.view.shape(),
            self.view.strides()[axis]
        );
        Error::invalid(self.name, value, rule)
    }

    fn unit_last_stride(&self) -> Result<()> {
        let axis = self.shape().len() - 1;
        if self.shape()[axis] <= 1 || self.view.strides()[axis] == 1 {
            return Ok(());
        }
        Err(self.stride_error(axis, "the last stride is 1 element"))
    }

    fn aligned_rows(&self) -> Result<()> {
        self.aligned(0..self.shape().len() - 1)
    }

    /// The pointer and the strides of these dimensions are multiples of what CUDA kernels load.
    pub fn aligned(&self, axes: Range<usize>) -> Result<()> {
        if !self.view.ptr().is_multiple_of(CUDA_ROW_ALIGNMENT) {
            let rule = format!("on CUDA rows begin on {CUDA_ROW_ALIGNMENT}-byte boundaries");
            return Err(Error::invalid(
                self.name,
                format!("at address {:#x}", self.view.ptr()),
                rule,
            ));
        }
        let step = (CUDA_ROW_ALIGNMENT / self.view.dtype().size()) as i64;
        for axis in axes {
            if self.shape()[axis] > 1 && self.view.strides()[axis] % step != 0 {
                let rule =
                    format!("on CUDA this stride is a multiple of {step} elements (16 bytes)");
                return Err(self.stride_error(axis, rule));
            }
        }
        Ok(())
    }

    /// No two indices share an element: from the shortest stride up, each steps over all that lies below it.
    fn distinct_elements(&self) -> Result<()> {
        let rank = self.shape().len();
        // The usual order, the last dimension's stride the shortest, is there without sorting.
        if self.first_short_step((0..rank).rev()).is_none() {
            return Ok(());
        }
        let mut axes: [usize; MAX_RANK] = std::array::from_fn(|axis| axis);
        let axes = &mut axes[..rank];
        axes.sort_unstable_by_key(|&axis| self.view.strides()[axis].unsigned_abs());
        match self.first_short_step(axes.iter().copied()) {
            None => Ok(()),
            Some(axis) => {
                Err(self.stride_error(axis, "an output has its own memory for every element"))
            }
        }
    }

    /// The first of these dimensions whose stride does not step over all that those before it reach.
    fn first_short_step(&self, axes: impl Iterator<Item = usize>) -> Option<usize> {
        let mut below: u128 = 0;
        for axis in axes {
            let (dim, stride) = (self.shape()[axis], self.view.strides()[axis]);
            if dim <= 1 {
                continue;
            }
            let stride = u128::from(stride.unsigned_abs());
            if stride <= below {
                return Some(axis);
            }
            below += stride * (dim - 1) as u128;
        }
        None
    }

    /// Pointer and the strides of the first `N` dimensions; those of dimensions of one index are 0.
    pub fn strided<const N: usize>(&self) -> Strided<N> {
        let mut strides = [0; N];
        for (axis, stride) in strides.iter_mut().enumerate().take(self.shape().len()) {
            if self.shape()[axis] > 1 {
                *stride = self.view.strides()[axis];
            }
        }
        Strided {
            ptr: self.view.ptr(),
            strides,
        }
    }
}

/// A CUDA device needs a build with its kernels; fp16 is a feature of its own there.
pub(crate) fn device_dtype(name: &'static str, device: Device, dtype: DType) -> Result<()> {
    if device.is_cuda() && dtype == DType::Fp16 && !cfg!(feature = "fp16") {
        let rule = "this build has no fp16 kernels: build ferromla with its feature `fp16`";
        return Err(Error::unsupported(name, dtype, rule));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// As an output at this address.
    fn output(ptr: u64, shape: &[i64], strides: &[i64]) -> Result<()> {
        // SAFETY: checks do not touch the memory.
        let view = unsafe { View::new(ptr as *const _, DType::F32, Device::Cpu, shape, strides) };
        Arg::new("out", &view).memory(Last::Any, Access::Write)
    }

    #[test]
    fn outputs_whose_elements_meet_are_refused_by_the_axis_that_steps_too_short() {
        let mut taken = 0;
        for code in 0..12_i64.pow(3) {
            let strides = [code % 12 - 2, code / 12 % 12 - 2, code / 144 - 2];
            let offsets: HashSet<_> = (0..12)
                .map(|i| i / 6 * strides[0] + i / 2 % 3 * strides[1] + i % 2 * strides[2])
                .collect();
            let result = output(1 << 20, &[2, 3, 2], &strides);
            taken += usize::from(result.is_ok());
            assert!(result.is_err() || offsets.len() == 12, "{strides:?}");
        }
        // Some in each of the six orders of three axes.
        assert!(taken > 100, "{taken}");
        for strides in [[6, 2, 1], [1, 2, 6], [3, 1, 6], [-6, 2, -1]] {
            output(1 << 20, &[2, 3, 2], &strides).unwrap();
        }
        for (strides, axis) in [
            ([6, 1, 1], 2),
            ([2, 2, 1], 1),
            ([1, 6, 1], 2),
            ([0, 0, 0], 0),
        ] {
            let error = output(1 << 20, &[2, 3, 2], &strides).unwrap_err();
            let named = format!("along dimension {axis}");
            assert!(error.to_string().contains(&named), "{strides:?}: {error}");
        }
    }

    #[test]
    fn every_element_has_an_address() {
        let top = i64::MAX as u64;
        for (ptr, shape, strides, fits) in [
            (top - 3, [1, 1], [1, 1], false), // on no 4-byte boundary
            (top - 7, [1, 1], [1, 1], true),
            (top - 7, [2, 1], [1, 1], false),
            (top - 7, [2, 1], [-1, 1], true),
            (top + 1, [1, 1], [1, 1], false),
            (top + 1, [2, 1], [i64::MIN / 4, 1], false),
            (64, [17, 1], [-1, 1], true),
            (64, [18, 1], [-1, 1], false),
            (64, [2, 2], [i64::MAX, i64::MIN], false),
            (64, [2, 2], [i64::MAX / 4, i64::MAX / 4], false),
        ] {
            let result = output(ptr, &shape, &strides);
            assert_eq!(result.is_ok(), fits, "{ptr:#x} {shape:?} {strides:?}");
        }
    }
}
