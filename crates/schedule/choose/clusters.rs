//! Clusters of CTAs that share the tiles of an item, each unit having one of its own, where times (`times.rs`) are not known.

use super::{Choice, MAX_CLUSTER, Problem, Work};
use crate::plan_layout::FM_TILE_ROWS;
use crate::problem::{Keys, Split};

/// CTAs that items are shared out to by clusters only if so many have work: fewer leave memory idle, ...
const BUSY_CTAS: i32 = 72;
/// ... by pairs of 16 rows, which take least of an SM, if so many have, ...
const BUSY_PAIRED_CTAS: i32 = 64;
/// ... unless there is little work for more units than this, or [`FEW_TILES`] for as many: then being split costs more.
pub(super) const FEW_UNITS: i32 = 8;
/// Tiles of a unit, at most, up to which a cluster of 16 has no more than one for each CTA. Units of such clusters are never cut.
const FEW_TILES: i64 = 16;

impl Choice {
    /// Of a cluster: a worker for each unit if they are to be `uncut`. Of more than [`MAX_CLUSTER`] CTAs always, and
    /// no parts, each of which would be too short: merges have words for the CTAs of clusters up to that only.
    pub(super) fn for_clusters(mut self, Work { units, tiles }: Work, uncut: bool) -> Self {
        let never_cut = self.splits > MAX_CLUSTER;
        if uncut || never_cut {
            self.workers = (units as i32).max(1);
        }
        if never_cut {
            self.min_part = self.min_part.max(tiles as i32);
        }
        self
    }
}

impl Problem {
    /// Clusters of CTAs that share an item, where every unit of few rows gets a cluster of its own that way and enough CTAs
    /// have work.
    pub(super) fn shared(&self, rows: i32, sm_count: i32, clusters: [i32; 4]) -> Option<Choice> {
        if rows == FM_TILE_ROWS {
            return None;
        }
        match self.split {
            Split::Never | Split::Rest | Split::Invariant { parts: Some(_) } => return None,
            Split::INVARIANT => return self.invariant_pairs(rows, sm_count, clusters),
            Split::Auto | Split::Fixed(_) => {}
        }
        let most_splits = match self.keys {
            Keys::Pages if rows == 32 => 1,
            _ if !self.lengths_may_differ() => 16,
            Keys::Pages | Keys::Mixed => 2,
            Keys::Codes | Keys::ScaledCodes | Keys::Rows => 1,
        };
        let work = self.work(rows);
        let Work { units, tiles } = work;
        let few = units <= FEW_UNITS.into();
        let little = !few && self.is_little_work(sm_count);
        let short = few && self.split == Split::Auto && tiles <= FEW_TILES;
        [16, 8, 4, 2]
            .into_iter()
            .zip(clusters.into_iter().rev())
            .filter(|&(splits, _)| splits <= most_splits)
            .filter(|&(splits, _)| i64::from(splits) < 2 * tiles && (splits < 16 || short))
            .find(|&(splits, clusters)| {
                let least = match (splits, rows) {
                    (2, 16) => BUSY_PAIRED_CTAS,
                    _ => BUSY_CTAS,
                };
                let busy = i128::from(splits) * units >= least.into();
                units <= clusters.into() && (busy || little || short)
            })
            .map(|(splits, clusters)| {
                let costs = self.costs_of_few_rows(rows, work, sm_count);
                // None is cut of little work: each unit costs less than being split would.
                Choice::new((rows, 1, splits), clusters, costs).for_clusters(work, little || short)
            })
    }
}
