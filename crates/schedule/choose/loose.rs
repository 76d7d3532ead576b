//! How many query rows a CTA takes where the bound on lengths is a loose one, which says little about them.

use super::times::{Time, TimesOfRows};
use super::{Choice, Problem, Split};
use crate::layout::DivCeil;
use crate::plan_layout::{FM_TILE_ROWS, FM_TILE_TOKENS};

/// The longest sequences that are looked at, in tiles: of 131,072 tokens ...
const LONGEST: i64 = 2048;
/// ... or as long as the bound is, and a part of it: rows that are best for some lengths take longer than others for the rest.
const PARTS: [i64; 4] = [32, 8, 2, 1];

/// Units of 32 rows above which requests of as many tokens have the rows that they have: of more any rows keep all multiprocessors busy, and what
/// long ones lose by fewer rows is more than what short ones gain.
const MOST_UNITS: i128 = 8;

/// A choice and how much longer than the best one it takes: the sum over lengths of the squares, in 1,024ths of what that takes.
struct Candidate {
    choice: Choice,
    excess: Time,
}

impl Problem {
    /// The rows of single CTAs with which calls take least longer than with the best ones for each length, where times (`times.rs`) are known.
    pub(super) fn rows_of_loose_bound(&self, sm_count: i32) -> Option<i32> {
        if !self.has_loose_bound() {
            return None;
        }
        let times = self.times()?;
        if !self.is_ragged() && self.work(32).units > MOST_UNITS {
            return None;
        }
        if let &[only] = self.rows_to_time() {
            return Some(only);
        }
        let choices = self.rows_to_time().iter();
        let choices = choices.map(|&rows| self.alone(rows, sm_count));
        let least = self.least_longer(choices, times, sm_count)?;
        Some(least.rows)
    }

    /// The same for teams of CTAs of 64 rows, where they may be smaller than usual.
    pub(super) fn in_team_of_loose_bound(&self, rows: i32, sm_count: i32) -> Option<Choice> {
        if rows != FM_TILE_ROWS || !self.has_loose_bound() {
            return None;
        }
        let mut smaller = self.smaller_teams(sm_count).peekable();
        smaller.peek()?;
        let teams = std::iter::once(self.team()).chain(smaller);
        let choices = teams.map(|team| self.in_teams(team, sm_count));
        self.least_longer(choices, self.times()?, sm_count)
    }

    fn has_loose_bound(&self) -> bool {
        self.split == Split::Auto && self.lengths_may_differ()
    }

    /// Of choices the one with which calls take least longer than with the best ones for each length.
    fn least_longer(
        &self,
        choices: impl Iterator<Item = Choice>,
        times: &TimesOfRows,
        sm_count: i32,
    ) -> Option<Choice> {
        let mut candidates: Vec<_> = choices
            .map(|choice| Candidate { choice, excess: 0 })
            .collect();
        let bound = i64::from(self.max_seq_len).div_ceil_positive(FM_TILE_TOKENS);
        for part in PARTS {
            let tiles = bound.min(LONGEST) / part;
            let time = |c: &Candidate| self.time_in_teams(&c.choice, tiles, times, sm_count);
            let taken: Vec<_> = candidates.iter().map(time).collect::<Option<_>>()?;
            let best = taken.iter().copied().min()?.max(1);
            for (candidate, time) in candidates.iter_mut().zip(taken) {
                let more = (time - best) * 1024 / best;
                candidate.excess += more * more;
            }
        }
        let least = candidates.into_iter().min_by_key(|c| c.excess);
        least.map(|c| c.choice)
    }
}
