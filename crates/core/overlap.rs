//! What a call writes lies apart from everything else that it is given.

use crate::check::Arg;
use crate::error::{Error, Result};
use crate::view::{MAX_RANK, View};

/// Most arguments of a call.
const MOST: usize = 16;

/// The memory of a call's arguments.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Taken {
    extents: [(&'static str, Extent); MOST],
}

/// From the lowest address to past the highest.
type Extent = [u64; 2];

/// The first `outputs` of these lie apart from all others. All of them have been checked.
pub(crate) fn apart(outputs: usize, args: &[Option<Arg<'_>>]) -> Result<Taken> {
    let mut extents = [("", [0, 0]); MOST];
    for (i, arg) in args.iter().enumerate() {
        let Some(arg) = arg else { continue };
        let own = extent(arg.view);
        for (j, &(name, other)) in extents[..i].iter().enumerate() {
            let meets = |other: Arg<'_>| may_meet(other.view, arg.view);
            if j < outputs && cross(own, other) && args[j].is_some_and(meets) {
                return Err(refused(name, arg.name));
            }
        }
        extents[i] = (arg.name, own);
    }
    Ok(Taken { extents })
}

impl Taken {
    /// The memory of `name`, `bytes` from `ptr` on, lies apart from all of these.
    pub fn apart_from(&self, name: &'static str, ptr: u64, bytes: u64) -> Result<()> {
        let own = [ptr, ptr.saturating_add(bytes)];
        let mut all = self.extents.iter();
        match all.find(|(_, other)| cross(own, *other)) {
            Some((other, _)) => Err(refused(name, other)),
            None => Ok(()),
        }
    }
}

fn cross(a: Extent, b: Extent) -> bool {
    a[0] < b[1] && b[0] < a[1]
}

fn refused(name: &'static str, other: &str) -> Error {
    let value = format!("in the memory of {other}");
    let rule = "what a call writes lies apart from its other arguments";
    Error::invalid(name, value, rule)
}

/// Nothing without elements.
fn extent(view: &View) -> Extent {
    let size = view.dtype().size();
    let (mut low, mut high) = (view.ptr(), view.ptr() + size);
    for (&dim, &stride) in view.shape().iter().zip(&view.strides()[..]) {
        if dim == 0 {
            return [0, 0];
        }
        let reach = stride.unsigned_abs() * (dim as u64 - 1) * size;
        if stride < 0 {
            low -= reach;
        } else {
            high += reach;
        }
    }
    [low, high]
}

/// Whether two views whose extents cross have, or may have, a byte in common. Exact where they are parts of the same
/// rows, at whatever dimension they are told apart.
fn may_meet(a: &View, b: &View) -> bool {
    let (a, b) = (Bytes::of(a), Bytes::of(b));
    // Steps of `shortest` and more are multiples of their divisor: what both have within one such period tells.
    let told_apart = |shortest: u64| {
        let period = gcd(a.divisor(shortest), b.divisor(shortest));
        let ahead = (b.begin % period + period - a.begin % period) % period;
        a.span(shortest) <= ahead && b.span(shortest) <= period - ahead
    };
    let mut steps = a.steps.iter().chain(&b.steps).map(|&(step, _)| step);
    !steps.any(|step| step > 0 && told_apart(step))
}

/// The bytes of a view: where the lowest ones are, how long an element is, and by how much each dimension goes on.
struct Bytes {
    begin: u64,
    element: u64,
    steps: [(u64, u64); MAX_RANK],
}

impl Bytes {
    /// Of a view that has elements.
    fn of(view: &View) -> Self {
        let element = view.dtype().size();
        let mut steps = [(0, 0); MAX_RANK];
        let dims = view.shape().iter().zip(&view.strides()[..]);
        for ((&dim, &stride), to) in dims.zip(&mut steps) {
            if dim > 1 {
                *to = (stride.unsigned_abs() * element, dim as u64 - 1);
            }
        }
        Self {
            begin: extent(view)[0],
            element,
            steps,
        }
    }

    /// From the first byte to past the last one that steps shorter than this reach.
    fn span(&self, shortest: u64) -> u64 {
        let shorter = self.steps.iter().filter(|(step, _)| *step < shortest);
        self.element + shorter.map(|(step, times)| step * times).sum::<u64>()
    }

    /// Divides all steps as long as this, or longer; 0: there are none.
    fn divisor(&self, shortest: u64) -> u64 {
        let longer = self.steps.iter().filter(|(step, _)| *step >= shortest);
        longer.fold(0, |divisor, (step, _)| gcd(divisor, *step))
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::dtype::{DType, Device};

    fn view(ptr: u64, dtype: DType, shape: &[i64], strides: &[i64]) -> View {
        // SAFETY: checks do not touch the memory.
        unsafe { View::new(ptr as *const _, dtype, Device::Cpu, shape, strides) }
    }

    fn meet(a: &View, b: &View) -> bool {
        apart(1, &[Some(Arg::new("out", a)), Some(Arg::new("q", b))]).is_err()
    }

    fn bytes(view: &View) -> HashSet<i64> {
        let mut all = HashSet::from([view.ptr() as i64]);
        for (&dim, &stride) in view.shape().iter().zip(&view.strides()[..]) {
            let step = stride * view.dtype().size() as i64;
            all = (0..dim)
                .flat_map(|i| all.iter().map(move |at| at + i * step).collect::<Vec<_>>())
                .collect();
        }
        let size = view.dtype().size() as i64;
        all.into_iter().flat_map(|at| at..at + size).collect()
    }

    #[test]
    fn views_with_a_byte_in_common_are_never_taken_for_apart() {
        let mut state = 1u64;
        let mut random = |below: u64| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        let (mut met, mut parted) = (0, 0);
        for _ in 0..20_000 {
            let mut any = || {
                let mut number = |below| random(below) as i64;
                let shape = [number(4), number(4) + 1, number(4) + 1];
                let strides = [number(40) - 10, number(16) - 2, number(4)];
                let dtype = [DType::U8, DType::Bf16, DType::F32][number(3) as usize];
                view(1024 + 4 * number(40) as u64, dtype, &shape, &strides)
            };
            let (a, b) = (any(), any());
            let common = !bytes(&a).is_disjoint(&bytes(&b));
            assert!(!common || meet(&a, &b), "{a:?} {b:?}");
            assert_eq!(meet(&a, &b), meet(&b, &a), "{a:?} {b:?}");
            met += usize::from(common);
            parted += usize::from(!meet(&a, &b));
        }
        assert!(met > 1000 && parted > 1000, "{met} {parted}");
    }

    #[test]
    fn parts_of_the_same_rows_are_apart() {
        let of = |ptr, shape: &[i64], strides: &[i64]| view(ptr, DType::Bf16, shape, strides);
        let (rows, half) = ([4 * 576, 576, 1], 1 << 20);
        for (a, b) in [
            // columns of rows, heads of tokens, tokens of requests, every other token
            (
                of(half, &[3, 4, 512], &rows),
                of(half + 1024, &[3, 4, 64], &rows),
            ),
            (
                of(half, &[3, 2, 576], &rows),
                of(half + 2 * 1152, &[3, 2, 576], &rows),
            ),
            (
                of(half, &[3, 2, 512], &rows),
                of(half + 2 * 1152, &[3, 2, 512], &rows),
            ),
            (
                of(half, &[1, 4, 576], &rows),
                of(half + 4 * 1152, &[2, 4, 576], &rows),
            ),
            (
                of(half, &[3, 576], &[1152, 1]),
                of(half + 1152, &[3, 576], &[1152, 1]),
            ),
            (
                of(half + 4 * 1152, &[3, 576], &[-1152, 1]),
                of(half + 1152, &[3, 576], &[1152, 1]),
            ),
        ] {
            assert!(!meet(&a, &b), "{a:?} {b:?}");
        }
        let whole = of(half, &[3, 4, 576], &rows);
        for other in [
            whole,
            of(half + 1150, &[1], &[1]),
            of(half + 1152, &[2, 512], &[576, 1]),
        ] {
            assert!(meet(&whole, &other), "{other:?}");
        }
    }
}
