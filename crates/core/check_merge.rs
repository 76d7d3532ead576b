//! The arguments of `merge_states`, checked.

use crate::check::{Access, Arg, Last, device_dtype};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::merge::MergeArgs;
use crate::overlap::apart;
use crate::problem::{MergeProblem, NOPE_DIM, Strided};
use crate::view::MAX_RANK;

/// Views of rank 2 to 4 become three dimensions of rows: leading ones are added.
pub(crate) fn merge(args: &MergeArgs) -> Result<MergeProblem> {
    let out_a = Arg::new("out_a", &args.out_a);
    let shape = out_a.rank(&[2, 3, 4], "[..., heads, 512]")?;
    let (leading, width) = shape.split_at(shape.len() - 1);
    if width[0] != NOPE_DIM {
        let value = format!("of shape {}", args.out_a.shape());
        return Err(Error::invalid("out_a", value, "the last dimension is 512"));
    }
    let dtype = out_a.dtype(&[DType::Bf16, DType::Fp16], "")?;
    let device = args.out_a.device();
    device_dtype("out_a", device, dtype)?;

    let rows = |name, view, access| -> Result<Strided<3>> {
        let arg = Arg::new(name, view);
        arg.exactly(shape, "out_a")?;
        arg.dtype(&[dtype], ", as out_a is")?;
        arg.device(device, "out_a")?;
        arg.memory(Last::Rows, access)?;
        Ok(three(&arg, leading.len()))
    };
    let scalars = |name, view, access| -> Result<Strided<3>> {
        let arg = Arg::new(name, view);
        arg.exactly(leading, "out_a without its last dimension")?;
        arg.dtype(&[DType::F32], "")?;
        arg.device(device, "out_a")?;
        arg.memory(Last::Any, access)?;
        Ok(three(&arg, leading.len()))
    };
    let problem = MergeProblem {
        device,
        dtype,
        dims: dims(leading),
        out_a: rows("out_a", &args.out_a, Access::Read)?,
        lse_a: scalars("lse_a", &args.lse_a, Access::Read)?,
        out_b: rows("out_b", &args.out_b, Access::Read)?,
        lse_b: scalars("lse_b", &args.lse_b, Access::Read)?,
        out: rows("out", &args.out, Access::Write)?,
        lse: scalars("lse", &args.lse, Access::Write)?,
        stream: args.stream,
    };
    if leading
        .iter()
        .try_fold(1i64, |rows, &dim| rows.checked_mul(dim))
        .is_none()
    {
        let value = format!("of shape {}", args.out_a.shape());
        return Err(Error::invalid(
            "out_a",
            value,
            "the number of rows is below 2^63",
        ));
    }
    outputs_apart(args)?;
    Ok(problem)
}

/// `out` and `lse` lie apart from each other, and from inputs that they are not themselves.
fn outputs_apart(args: &MergeArgs) -> Result<()> {
    let (out, lse) = (Arg::new("out", &args.out), Arg::new("lse", &args.lse));
    let itself = |a: &Arg<'_>, b: &Arg<'_>| {
        let strides = |arg: &Arg<'_>| arg.strided::<MAX_RANK>();
        a.view.dtype() == b.view.dtype() && strides(a) == strides(b)
    };
    let input = |name, view, output| {
        let input = Arg::new(name, view);
        Some(input).filter(|input| !itself(input, output))
    };
    let inputs = [
        input("out_a", &args.out_a, &out),
        input("lse_a", &args.lse_a, &lse),
        input("out_b", &args.out_b, &out),
        input("lse_b", &args.lse_b, &lse),
    ];
    let [out_a, lse_a, out_b, lse_b] = inputs;
    apart(2, &[Some(out), Some(lse), out_a, lse_a, out_b, lse_b]).map(drop)
}

fn dims(leading: &[i64]) -> [i32; 3] {
    let mut dims = [1; 3];
    for (dim, &given) in dims[3 - leading.len()..].iter_mut().zip(leading) {
        *dim = given as i32; // `rank` has bounded it
    }
    dims
}

/// The strides of the leading dimensions, after as many zeros as are missing to three.
fn three(arg: &Arg<'_>, leading: usize) -> Strided<3> {
    let given: Strided<3> = arg.strided();
    let mut strides = [0; 3];
    strides[3 - leading..].copy_from_slice(&given.strides[..leading]);
    Strided {
        ptr: given.ptr,
        strides,
    }
}
