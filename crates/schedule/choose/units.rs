//! Whether requests have one unit each, so that nobody reads their tiles but the CTAs of one team.

use super::{Choice, Problem, Queries};

impl Problem {
    /// Whether a unit has all rows of its request and KV head, for every request. `false` also where that is not known.
    pub fn is_a_unit_each(&self, choice: &Choice) -> bool {
        let q_len = match self.queries {
            Queries::Uniform { q_len } => Some(q_len),
            Queries::Ragged { most, .. } => most,
            Queries::Sparse { .. } => None,
        };
        let fits = |q_len| i64::from(q_len) * i64::from(self.group) <= choice.unit_rows.into();
        q_len.is_some_and(fits)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Keys, Split, Target, choose};
    use super::*;

    fn is_a_unit_each(queries: Queries, group: i32) -> bool {
        let problem = Problem {
            batch: 128,
            queries,
            group,
            kv_heads: 1,
            keys: Keys::Pages,
            causal: true,
            max_seq_len: i32::MAX,
            split: Split::Auto,
            target: Target::Gpu {
                sm_count: 132,
                clusters: [66, 30, 15, 7],
                memory: 4814,
            },
        };
        problem.is_a_unit_each(&choose(&problem))
    }

    #[test]
    fn decodes_are_and_chunks_are_not() {
        for (q_len, group, expected) in [
            (1, 16, true),
            (2, 16, true),
            (1, 128, true),
            (2, 128, true),
            (8, 128, false),
            (1024, 1, false),
            (i32::MAX, 128, false),
        ] {
            let is = is_a_unit_each(Queries::Uniform { q_len }, group);
            assert_eq!(is, expected, "{q_len} tokens of {group} heads");
        }
    }

    #[test]
    fn ragged_ones_are_if_the_longest_is_known_to_fit() {
        let of = |most| is_a_unit_each(Queries::Ragged { tokens: 256, most }, 16);
        assert_eq!([of(None), of(Some(2)), of(Some(3))], [false, true, false]);
    }
}
