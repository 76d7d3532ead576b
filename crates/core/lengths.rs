//! What a plan is made from at each step: the lengths, and which query tokens are whose.

use std::borrow::Cow;

use ferromla_schedule::ListLens;

use crate::check::Arg;
use crate::check_parts::qo_indptr as check_qo_indptr;
use crate::dtype::Device;
use crate::error::{Error, Result};
use crate::problem::Strided;
use crate::view::View;

/// Lengths, all int32 on one device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lengths {
    /// `[batch]`, constant along the second dimension. Of lists of keys: `[batch, q_len]`, or `None` for all
    /// entries of every list.
    pub seq_lens: Option<Strided<2>>,
    /// Of the lists of the extra cache, in the same way.
    pub extra_lens: Option<Strided<2>>,
    /// `[batch + 1]` offsets, for ragged queries.
    pub qo_indptr: Option<Strided<1>>,
}

impl Lengths {
    pub const fn of_requests(seq_lens: Strided<1>, qo_indptr: Option<Strided<1>>) -> Self {
        Self {
            seq_lens: Some(seq_lens.constant()),
            extra_lens: None,
            qo_indptr,
        }
    }
}

/// Lengths of lists, read from host memory.
pub(crate) struct HostLists {
    data: Vec<i32>,
    stride: [usize; 2],
}

impl HostLists {
    /// `size` is `[batch, q_len]`.
    ///
    /// # Safety
    /// That many elements of live host memory.
    pub unsafe fn read(lens: &Strided<2>, size: [usize; 2]) -> Self {
        let [step, across] = lens.strides;
        // One column stands for all where they are the same.
        let columns = if across == 0 { size[1].min(1) } else { size[1] };
        let at = |row: usize, column: usize| {
            let offset = row as i64 * step + column as i64 * across;
            (lens.ptr as *const i32).wrapping_offset(offset as isize)
        };
        let data = (0..size[0])
            .flat_map(|row| (0..columns).map(move |column| (row, column)))
            // SAFETY: the caller's promise.
            .map(|(row, column)| unsafe { at(row, column).read() })
            .collect();
        let stride = [columns, usize::from(across != 0)];
        Self { data, stride }
    }

    pub fn view(&self) -> ListLens<'_> {
        ListLens {
            data: &self.data,
            stride: self.stride,
        }
    }
}

/// The first `count` values.
///
/// # Safety
/// `count` elements of live host memory, `'a` long.
pub(crate) unsafe fn host_values<'a>(values: &Strided<1>, count: usize) -> Cow<'a, [i32]> {
    let (ptr, stride) = (values.ptr as *const i32, values.strides[0] as isize);
    if count == 0 {
        Cow::Borrowed(&[])
    } else if stride == 1 || count == 1 {
        // SAFETY: consecutive elements, live by the caller's promise.
        Cow::Borrowed(unsafe { std::slice::from_raw_parts(ptr, count) })
    } else {
        let at = |i: usize| ptr.wrapping_offset(i as isize * stride);
        // SAFETY: the view's elements, live by the caller's promise.
        (0..count).map(|i| unsafe { at(i).read() }).collect()
    }
}

/// The same where it never falls. Where it does, two requests would share query tokens: threads of the CPU
/// backend would write the same rows, so the later request loses them.
pub(crate) fn never_falling(mut indptr: Cow<'_, [i32]>) -> Cow<'_, [i32]> {
    if !indptr.is_sorted() {
        let mut most = i32::MIN;
        for value in indptr.to_mut() {
            most = most.max(*value);
            *value = most;
        }
    }
    indptr
}

/// The query tokens of all requests, by the last entry of a `qo_indptr` (`[batch + 1]` int32) in host memory.
///
/// # Errors
/// [`Error::InvalidArgument`] for another shape, type or device, and a last entry below 0.
///
/// # Safety
/// The view describes live memory.
///
/// ```
/// use ferromla::{DType, Device, View, num_tokens};
/// let indptr = [0i32, 3, 3, 8];
/// // SAFETY: the view describes the array above.
/// let t = unsafe { num_tokens(&View::contiguous(indptr.as_ptr().cast(), DType::I32, Device::Cpu, &[4]))? };
/// assert_eq!(t, 8);
/// # Ok::<(), ferromla::Error>(())
/// ```
pub unsafe fn num_tokens(qo_indptr: &View) -> Result<i64> {
    let arg = Arg::new("qo_indptr", qo_indptr);
    let count = arg.rank(&[1], "[batch + 1]")?[0];
    if count < 1 {
        return Err(Error::invalid(
            "qo_indptr",
            "of shape [0]",
            "it is [batch + 1]",
        ));
    }
    let batch = (count - 1, "the batch + 1");
    check_qo_indptr(&arg, (Device::Cpu, "a plan without num_tokens"), batch)?;
    // SAFETY: the caller's promise; the view has been checked.
    let values = unsafe { host_values(&arg.strided(), count as usize) };
    match values[count as usize - 1] {
        last if last < 0 => Err(Error::invalid(
            "qo_indptr",
            format!("{last} at the end"),
            "at least 0",
        )),
        last => Ok(last.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_by_any_strides() {
        let data = [1, 2, 3, 4, 5, 6];
        let read = |strides, first: usize| {
            let ptr = data[first..].as_ptr() as u64;
            // SAFETY: within `data`.
            let lists = unsafe { HostLists::read(&Strided { ptr, strides }, [2, 3]) };
            (lists.data, lists.stride)
        };
        assert_eq!(read([3, 1], 0), (vec![1, 2, 3, 4, 5, 6], [3, 1]));
        assert_eq!(read([-3, -1], 5), (vec![6, 5, 4, 3, 2, 1], [3, 1]));
        assert_eq!(read([4, 0], 1), (vec![2, 6], [1, 0]));
        assert_eq!(read([0, 2], 0), (vec![1, 3, 5, 1, 3, 5], [3, 1]));
    }

    #[test]
    fn offsets_that_fall_give_no_token_twice() {
        let of = |indptr: &'static [i32]| never_falling(Cow::Borrowed(indptr)).into_owned();
        assert_eq!(of(&[0, 2, 2, 9]), [0, 2, 2, 9]);
        assert_eq!(of(&[0, 5, 3, 6]), [0, 5, 5, 6]);
        assert_eq!(of(&[7, -1, i32::MAX, 0]), [7, 7, i32::MAX, i32::MAX]);
        assert_eq!(of(&[0]), [0]);
    }
}
