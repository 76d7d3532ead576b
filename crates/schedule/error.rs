/// Why a plan cannot be made or read. Every variant carries what was given and the rule it breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A field of the shape is outside its range.
    #[error("{field} is {value}, must be {rule}")]
    Field {
        /// Name of the field, as in [`PlanShape`](crate::PlanShape).
        field: &'static str,
        /// What it was.
        value: i64,
        /// What is allowed.
        rule: &'static str,
    },
    /// A count that follows from the shape does not fit the 32-bit words of a plan.
    #[error("the shape needs {count} {what}, at most {} fit a plan", i32::MAX)]
    TooLarge {
        /// What is counted: `rows`, `units`, `items`, ...
        what: &'static str,
        /// How many there would be.
        count: i128,
    },
    /// A slice has the wrong number of elements.
    #[error("{argument} has {len} elements, {rule} {needed} needed")]
    Length {
        /// `seq_lens`, `qo_indptr` or `words`.
        argument: &'static str,
        /// Elements it has.
        len: usize,
        /// Elements the shape asks for.
        needed: usize,
        /// `exactly` or `at least`.
        rule: &'static str,
    },
    /// The words are no plan of this shape.
    #[error("{field} of the plan is {value}, must be {rule}: it was not made for this shape")]
    NotThisPlan {
        /// What was read.
        field: &'static str,
        /// What it was.
        value: i64,
        /// What is allowed.
        rule: &'static str,
    },
}
