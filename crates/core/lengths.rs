//! What a plan is made from at each step: the lengths, and which query tokens are whose.

use std::borrow::Cow;

use crate::check::Arg;
use crate::check_parts::qo_indptr as check_qo_indptr;
use crate::dtype::Device;
use crate::error::{Error, Result};
use crate::problem::Strided;
use crate::view::View;

/// `[batch]` lengths, and for ragged queries `[batch + 1]` offsets, both int32 on one device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lengths {
    pub seq_lens: Strided<1>,
    pub qo_indptr: Option<Strided<1>>,
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
        return Err(Error::invalid("qo_indptr", "of shape [0]", "it is [batch + 1]"));
    }
    let batch = (count - 1, "the batch + 1");
    check_qo_indptr(&arg, (Device::Cpu, "a plan without num_tokens"), batch)?;
    // SAFETY: the caller's promise; the view has been checked.
    let values = unsafe { host_values(&arg.strided(), count as usize) };
    match values[count as usize - 1] {
        last if last < 0 => Err(Error::invalid("qo_indptr", format!("{last} at the end"), "at least 0")),
        last => Ok(last.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_that_fall_give_no_token_twice() {
        let of = |indptr: &'static [i32]| never_falling(Cow::Borrowed(indptr)).into_owned();
        assert_eq!(of(&[0, 2, 2, 9]), [0, 2, 2, 9]);
        assert_eq!(of(&[0, 5, 3, 6]), [0, 5, 5, 6]);
        assert_eq!(of(&[7, -1, i32::MAX, 0]), [7, 7, i32::MAX, i32::MAX]);
        assert_eq!(of(&[0]), [0]);
    }
}
