//! Where a call's schedule comes from: a plan that was made before, or one of its own.

use crate::error::{Error, Result};
use crate::overlap::Taken;
use crate::plan::Plan;
use crate::plan_args::PlanArgs;
use crate::schedule::Schedule;
use crate::view::View;

#[derive(Debug, Clone, Copy)]
#[allow(clippy::large_enum_variant)] // lives for one call
pub(crate) enum PlanSource<'a> {
    Given(&'a Plan),
    /// Still to be made, in the call's workspace.
    Own {
        args: PlanArgs,
        schedule: Schedule,
    },
}

impl<'a> PlanSource<'a> {
    /// For a call that needs a plan of these arguments, which name the format.
    pub fn of(given: Option<&'a Plan>, call: PlanArgs) -> Result<Self> {
        if let Some(plan) = given {
            fits(plan, &call)?;
            return Ok(Self::Given(plan));
        }
        Ok(Self::Own {
            schedule: Schedule::new(&call)?,
            args: call,
        })
    }

    /// Bytes of the workspace of the call: 0 with a plan.
    pub fn workspace_bytes(&self) -> u64 {
        match self {
            Self::Given(_) => 0,
            Self::Own { schedule, .. } => schedule.bytes,
        }
    }

    /// The workspace of a plan that was given lies apart from the call's arguments.
    pub fn apart_from(&self, taken: &Taken) -> Result<()> {
        match self {
            Self::Given(plan) => taken.apart_from("plan", plan.workspace.plan, plan.schedule.bytes),
            Self::Own { .. } => Ok(()),
        }
    }

    /// Calls `run` with the plan, and whether that is still to be filled. The workspace lies apart from the call's
    /// arguments.
    pub fn provide(
        &self,
        workspace: Option<&View>,
        taken: &Taken,
        run: impl FnOnce(&Plan, bool) -> Result<()>,
    ) -> Result<()> {
        let (args, schedule) = match self {
            Self::Given(plan) => return run(plan, false),
            Self::Own { args, schedule } => (args, schedule),
        };
        let Some(workspace) = workspace else {
            let rule = format!("{} bytes are needed without a plan", schedule.bytes);
            return Err(Error::invalid("workspace", "None", rule));
        };
        let plan = Plan::unfilled(args, schedule, workspace)?;
        taken.apart_from("workspace", workspace.ptr(), schedule.bytes)?;
        run(&plan, true)
    }
}

/// The plan was made for this call, and nothing asks for another one.
fn fits(plan: &Plan, call: &PlanArgs) -> Result<()> {
    plan.args().check_call(call)?;
    let made = plan.args();
    for (argument, given, made_with) in [
        (
            "num_splits",
            call.num_splits.map(i64::from),
            made.num_splits.map(i64::from),
        ),
        ("max_q_len", call.max_q_len, made.max_q_len),
    ] {
        let Some(number) = given.filter(|_| given != made_with) else {
            continue;
        };
        let made_with = made_with.map_or("None".to_owned(), |n| n.to_string());
        let value = format!("{number} with a plan");
        let rule = format!("None, or {made_with} as the plan was made with");
        return Err(Error::invalid(argument, value, rule));
    }
    if call.batch_invariant && !plan.args().batch_invariant {
        let rule = "the plan was made without batch_invariant";
        return Err(Error::invalid("batch_invariant", "true with a plan", rule));
    }
    Ok(())
}
