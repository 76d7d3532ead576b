//! Named workloads and the layouts they get.

use super::*;

/// (batch, query heads per KV head, query tokens).
pub(super) type Batch = (i32, i32, Queries);
/// (rows, team, splits, workers, most units).
pub(super) type Layout = (i32, i32, i32, i32, i32);

pub(super) const fn each(q_len: i32) -> Queries {
    Queries::Uniform { q_len }
}

pub(super) const fn all(tokens: i32) -> Queries {
    Queries::Ragged { tokens, most: None }
}

/// So many tokens, at most `most` of a request.
pub(super) const fn up_to(most: i32, tokens: i32) -> Queries {
    Queries::Ragged {
        tokens,
        most: Some(most),
    }
}

pub(super) const fn lists(q_len: i32) -> Queries {
    Queries::Sparse {
        q_len,
        topk: 2048,
        extra_topk: 0,
    }
}

/// Name, batch, layout.
#[rustfmt::skip]
pub(super) const WORKLOADS: &[(&str, Batch, Layout)] = &[
    ("8 GPUs share the heads", (128, 16, each(1)), (16, 1, 1, 132, 128)),
    ("8 GPUs, one draft token", (128, 16, each(2)), (32, 1, 1, 132, 128)),
    ("4 GPUs share the heads", (128, 32, each(1)), (32, 1, 1, 132, 128)),
    ("4 GPUs, one draft token", (128, 32, each(2)), (64, 1, 1, 132, 128)),
    ("2 GPUs share the heads", (128, 64, each(1)), (64, 1, 1, 132, 128)),
    ("2 GPUs, one draft token", (128, 64, each(2)), (64, 2, 1, 66, 128)),
    ("all heads", (128, 128, each(1)), (64, 2, 1, 66, 128)),
    ("all heads, one draft token", (128, 128, each(2)), (64, 4, 1, 33, 128)),
    ("all heads, three draft tokens", (128, 128, each(4)), (64, 8, 1, 16, 128)),
    ("more rows than a team of 8 holds", (128, 128, each(5)), (64, 4, 1, 33, 384)),
    ("64 requests, few heads", (64, 16, each(1)), (16, 1, 2, 66, 64)),
    ("16 requests, few heads", (16, 16, each(1)), (16, 1, 1, 132, 16)),
    ("24 requests, few heads", (24, 16, each(1)), (16, 1, 1, 132, 24)),
    ("64 requests, all heads", (64, 128, each(1)), (64, 2, 1, 66, 64)),
    ("18 requests, few heads", (18, 16, each(1)), (16, 1, 1, 132, 18)),
    ("32 requests, few heads", (32, 16, each(1)), (16, 1, 2, 66, 32)),
    ("36 requests, 32 heads", (36, 32, each(1)), (32, 1, 1, 132, 36)),
    ("32 requests, half the heads", (32, 64, each(1)), (64, 1, 1, 132, 32)),
    ("32 requests, all heads", (32, 128, each(1)), (64, 2, 1, 66, 32)),
    ("8 requests, few heads", (8, 16, each(1)), (16, 1, 1, 128, 8)),
    ("8 requests, all heads", (8, 128, each(1)), (64, 2, 1, 66, 8)),
    ("one request, few heads", (1, 16, each(1)), (16, 1, 1, 128, 1)),
    ("one request, all heads", (1, 128, each(1)), (64, 2, 1, 66, 1)),
    ("heads that are no multiple of a tile", (64, 126, each(2)), (64, 4, 1, 33, 64)),
    ("one head", (64, 1, each(1)), (16, 1, 2, 66, 64)),
    ("no query token", (64, 128, each(0)), (16, 1, 1, 132, 0)),
    ("prefill chunk, all heads", (1, 128, all(4096)), (64, 2, 1, 66, 4096)),
    ("prefill chunk, few heads", (1, 16, all(4096)), (64, 2, 1, 66, 512)),
    ("a long call, all heads", (1, 128, all(32768)), (64, 2, 1, 66, 32768)),
    ("8 chunks of 512, few heads", (8, 16, all(4096)), (64, 2, 1, 66, 519)),
    ("a chunk among decodes, all heads", (64, 128, all(2111)), (64, 2, 1, 66, 2111)),
    ("a chunk among decodes, few heads", (64, 16, all(2111)), (64, 1, 1, 132, 575)),
    ("a chunk among decodes, half the heads", (128, 64, all(639)), (64, 2, 1, 66, 383)),
    ("the same, known to be one", (128, 64, up_to(512, 639)), (64, 1, 1, 132, 639)),
    ("a chunk among decodes, known to be one, few heads", (128, 16, up_to(512, 639)), (64, 1, 1, 132, 255)),
    ("drafts of up to five, few heads", (128, 16, up_to(5, 640)), (64, 2, 1, 66, 192)),
    ("drafts of up to eight, few heads", (128, 16, up_to(8, 640)), (64, 2, 1, 66, 192)),
    ("two chunks among decodes, 32 heads", (128, 32, up_to(256, 638)), (64, 1, 1, 132, 383)),
    ("a chunk among drafts of two, few heads", (128, 16, up_to(512, 766)), (64, 1, 1, 132, 287)),
    ("a chunk among drafts of five, as if seven were", (128, 16, up_to(100, 735)), (64, 1, 1, 132, 279)),
    ("two chunks, known to be all", (2, 16, up_to(1024, 2048)), (64, 2, 1, 66, 257)),
    ("64 of eight, as if it were not known", (64, 16, up_to(8, 512)), (64, 1, 1, 132, 176)),
    ("long chunk, few decodes, 32 heads", (32, 32, all(2079)), (64, 2, 1, 66, 543)),
    ("5 drafts or a short chunk, few heads", (128, 16, all(640)), (64, 2, 1, 66, 192)),
    ("drafts of 1 to 4, all heads", (64, 128, all(160)), (64, 2, 1, 66, 160)),
    ("drafts of 1 to 4, few heads", (64, 16, all(160)), (64, 1, 1, 132, 88)),
    ("decode as prefill, few heads", (128, 16, all(128)), (16, 1, 1, 132, 128)),
    ("decode as prefill, all heads", (128, 128, all(128)), (64, 2, 1, 66, 128)),
    ("one request as prefill", (1, 16, all(1)), (16, 1, 1, 128, 1)),
    ("no request", (0, 16, all(0)), (16, 1, 1, 132, 0)),
];

pub(super) const fn listed(topk: i32, extra_topk: i32) -> Queries {
    Queries::Sparse {
        q_len: 1,
        topk,
        extra_topk,
    }
}

/// Of mixed: name, batch, layout.
#[rustfmt::skip]
pub(super) const MIXED_WORKLOADS: &[(&str, Batch, Layout)] = &[
    ("8 GPUs share the heads", (128, 16, each(1)), (16, 1, 1, 132, 128)),
    ("8 GPUs, one draft token", (128, 16, each(2)), (64, 1, 1, 132, 128)),
    ("8 GPUs, four draft tokens", (128, 16, each(5)), (64, 2, 1, 66, 128)),
    ("4 GPUs share the heads", (128, 32, each(1)), (64, 1, 1, 132, 128)),
    ("2 GPUs share the heads", (128, 64, each(1)), (64, 1, 1, 132, 128)),
    ("all heads", (128, 128, each(1)), (64, 2, 1, 66, 128)),
    ("17 rows", (128, 17, each(1)), (64, 1, 1, 132, 128)),
    ("64 requests, few heads", (64, 16, each(1)), (16, 1, 2, 66, 64)),
    ("8 requests, few heads", (8, 16, each(1)), (16, 1, 1, 128, 8)),
    ("8 requests, one draft token", (8, 16, each(2)), (64, 1, 1, 132, 8)),
    ("one request, few heads", (1, 16, each(1)), (16, 1, 1, 128, 1)),
    ("one request, 32 heads", (1, 32, each(1)), (64, 1, 1, 132, 1)),
    ("lists, few heads", (128, 16, lists(1)), (16, 1, 1, 132, 128)),
    ("lists, few heads, one draft token", (32, 16, lists(2)), (16, 1, 2, 66, 64)),
    ("lists, 32 heads", (128, 32, lists(1)), (64, 1, 1, 132, 128)),
    ("lists, half the heads, 9 requests", (9, 64, lists(1)), (64, 1, 1, 132, 9)),
    ("lists, all heads, one draft token", (64, 128, lists(2)), (64, 2, 1, 66, 128)),
    ("drafts of 0 to 2, few heads", (64, 16, all(128)), (64, 1, 1, 132, 80)),
    ("drafts of 1 to 4, few heads", (64, 16, all(160)), (64, 1, 1, 132, 88)),
    ("decode as prefill, few heads", (128, 16, all(128)), (16, 1, 1, 132, 128)),
    ("no request", (0, 16, all(0)), (16, 1, 1, 132, 0)),
];

/// Name, query heads per KV head, batch, query tokens, keys at most, layout.
#[rustfmt::skip]
pub(super) const LITTLE_WORK: &[(&str, Batch, i32, Layout)] = &[
    ("one request of 16 tiles, few heads", (1, 16, each(1)), 1024, (16, 1, 16, 1, 1)),
    ("a token more", (1, 16, each(1)), 1025, (16, 1, 1, 17, 1)),
    ("of 8 tiles", (1, 16, each(1)), 512, (16, 1, 8, 1, 1)),
    ("of 4 tiles", (1, 16, each(1)), 256, (16, 1, 4, 1, 1)),
    ("of two tiles", (1, 16, each(1)), 128, (16, 1, 2, 1, 1)),
    ("of one tile", (1, 16, each(1)), 64, (16, 1, 1, 1, 1)),
    ("as many as there are clusters of 16", (7, 16, each(1)), 1024, (16, 1, 16, 7, 7)),
    ("9 of 4 tiles, few heads", (9, 16, each(1)), 256, (16, 1, 4, 9, 9)),
    ("one short request, all heads", (1, 128, each(1)), 1024, (16, 1, 8, 8, 8)),
    ("two short requests, half the heads", (2, 64, each(1)), 1024, (16, 1, 8, 8, 8)),
    ("two short requests, all heads", (2, 128, each(1)), 1024, (16, 1, 4, 16, 16)),
    ("as much as there may be", (1, 128, each(1)), 33 * 64, (16, 1, 1, 132, 8)),
    ("a tile more", (1, 128, each(1)), 33 * 64 + 1, (64, 2, 1, 66, 1)),
    ("one long request, all heads", (1, 128, each(1)), 8192, (64, 2, 1, 66, 1)),
    ("8 requests of a tile, all heads", (8, 128, each(1)), 64, (16, 1, 1, 132, 64)),
    ("lists, 32 heads, one request", (1, 32, lists(1)), 0, (16, 1, 1, 70, 2)),
    ("lists, half the heads, one request", (1, 64, lists(1)), 0, (16, 1, 1, 128, 4)),
    ("lists, all heads, two requests", (2, 128, lists(1)), 0, (64, 2, 1, 66, 2)),
    ("one request as prefill", (1, 128, all(1)), 64, (64, 2, 1, 66, 1)),
];

/// The same of pages of 16-bit numbers.
#[rustfmt::skip]
pub(super) const LITTLE_WORK_OF_PAGES: &[(&str, Batch, i32, Layout)] = &[
    ("two requests of 48 tiles, few heads", (2, 16, each(1)), 3072, (16, 1, 16, 2, 2)),
    ("3 of 48 tiles", (3, 16, each(1)), 3072, (16, 1, 16, 3, 3)),
    ("4 of 49 tiles", (4, 16, each(1)), 3073, (16, 1, 1, 104, 4)),
    ("5 of 64 tiles", (5, 16, each(1)), 4096, (16, 1, 16, 5, 5)),
    ("7 of 65 tiles", (7, 16, each(1)), 4097, (16, 1, 1, 132, 7)),
    ("7 of 16 tiles", (7, 16, each(1)), 1024, (16, 1, 16, 7, 7)),
    ("7 of 31 tiles", (7, 16, each(1)), 1984, (16, 1, 16, 7, 7)),
    ("7 of 32 tiles", (7, 16, each(1)), 2048, (16, 1, 16, 7, 7)),
    ("6 requests of 32 tiles, few heads", (6, 16, each(1)), 2048, (16, 1, 16, 6, 6)),
    ("8 of 48 tiles", (8, 16, each(1)), 3072, (16, 1, 1, 128, 8)),
    ("8 of 64 tiles", (8, 16, each(1)), 4096, (16, 1, 1, 128, 8)),
    ("16 of 16 tiles", (16, 16, each(1)), 1024, (16, 1, 1, 128, 16)),
    ("9 of 128 tiles", (9, 16, each(1)), 8192, (16, 1, 1, 117, 9)),
    ("12 of 128 tiles", (12, 16, each(1)), 8192, (16, 1, 1, 132, 12)),
    ("12 that may be longer", (12, 16, each(1)), 8193, (16, 1, 1, 132, 12)),
    ("16 of 128 tiles", (16, 16, each(1)), 8192, (16, 1, 1, 128, 16)),
    ("18 of 128 tiles", (18, 16, each(1)), 8192, (16, 1, 1, 126, 18)),
    ("24 of 128 tiles", (24, 16, each(1)), 8192, (16, 1, 1, 132, 24)),
    ("32 of 128 tiles", (32, 16, each(1)), 8192, (16, 1, 1, 128, 32)),
    ("64 of 128 tiles", (64, 16, each(1)), 8192, (16, 1, 1, 128, 64)),
    ("32 heads, 3 requests of 32 tiles", (3, 32, each(1)), 2048, (16, 1, 16, 6, 6)),
    ("32 heads, 6 requests of 32 tiles", (6, 32, each(1)), 2048, (16, 1, 8, 12, 12)),
    ("32 heads, 12 of 16 tiles", (12, 32, each(1)), 1024, (16, 1, 4, 24, 24)),
    ("32 heads, 16 of 32 tiles", (16, 32, each(1)), 2048, (16, 1, 1, 128, 32)),
    ("32 heads, as many as there are pairs, 48 tiles", (32, 32, each(1)), 3072, (32, 1, 1, 128, 32)),
    ("32 heads, a tile more", (32, 32, each(1)), 3073, (32, 1, 1, 128, 32)),
    ("32 heads, one long request", (1, 32, each(1)), 32768, (16, 1, 1, 128, 2)),
    ("32 heads, 4 that differ", (4, 32, each(1)), 32768, (16, 1, 1, 128, 8)),
    ("32 heads, 8 that differ", (8, 32, each(1)), 32768, (32, 1, 1, 128, 8)),
    ("32 heads, 8 that may be longer", (8, 32, each(1)), 32769, (32, 1, 1, 128, 8)),
    ("32 heads, 9 that differ", (9, 32, each(1)), 32768, (32, 1, 1, 132, 9)),
    ("32 heads, two of any length", (2, 32, each(1)), 1 << 20, (16, 1, 1, 128, 4)),
    ("32 heads, 4 of any length", (4, 32, each(1)), 1 << 20, (32, 1, 1, 128, 4)),
    ("64 heads, one of any length", (1, 64, each(1)), 1 << 20, (32, 1, 1, 128, 2)),
    ("64 heads, one of up to 256 tiles", (1, 64, each(1)), 16384, (16, 1, 1, 128, 4)),
    ("64 heads, two of any length", (2, 64, each(1)), 1 << 20, (64, 1, 1, 132, 2)),
    ("32 heads, 80 of 12 tiles", (80, 32, each(1)), 768, (32, 1, 1, 132, 80)),
    ("32 heads, 80 of more", (80, 32, each(1)), 769, (32, 1, 1, 132, 80)),
    ("32 heads, 32 of 64 tiles", (32, 32, each(1)), 4096, (32, 1, 1, 128, 32)),
    ("32 heads, 32 of any length", (32, 32, each(1)), 1 << 20, (32, 1, 1, 132, 32)),
    ("32 heads, 33 of 64 tiles", (33, 32, each(1)), 4096, (32, 1, 1, 132, 33)),
    ("32 heads, 40 of 128 tiles", (40, 32, each(1)), 8192, (32, 1, 1, 120, 40)),
    ("32 heads, 15 of 64 tiles", (15, 32, each(1)), 4096, (32, 1, 1, 120, 15)),
    ("32 heads, 9 of 64 tiles", (9, 32, each(1)), 4096, (32, 1, 1, 117, 9)),
    ("64 heads, 16 of 8 tiles", (16, 64, each(1)), 512, (16, 1, 2, 64, 64)),
    ("64 heads, 6 of 32 tiles", (6, 64, each(1)), 2048, (64, 1, 1, 132, 6)),
    ("64 heads, 8 of 32 tiles", (8, 64, each(1)), 2048, (64, 1, 1, 132, 8)),
    ("all heads, 8 of 8 tiles", (8, 128, each(1)), 512, (16, 1, 2, 64, 64)),
    ("all heads, 8 of 16 tiles", (8, 128, each(1)), 1024, (64, 2, 1, 66, 8)),
    ("all heads, one of 48 tiles", (1, 128, each(1)), 3072, (16, 1, 1, 128, 8)),
];

/// Of keys whose times are known: name, keys, batch, keys at most, layout.
#[rustfmt::skip]
pub(super) const KNOWN_TIMES: &[(&str, Keys, Batch, i32, Layout)] = &[
    ("8 GPUs share the heads", Keys::Codes, (128, 16, each(1)), 4096, (16, 1, 1, 132, 128)),
    ("4 GPUs share the heads", Keys::Codes, (128, 32, each(1)), 4096, (32, 1, 1, 132, 128)),
    ("2 GPUs share the heads", Keys::Codes, (128, 64, each(1)), 4096, (64, 1, 1, 132, 128)),
    ("all heads", Keys::Codes, (128, 128, each(1)), 4096, (64, 2, 1, 66, 128)),
    ("8 short requests, all heads", Keys::Codes, (8, 128, each(1)), 512, (16, 1, 2, 64, 64)),
    ("24 short requests, all heads", Keys::Codes, (24, 128, each(1)), 512, (32, 1, 1, 132, 96)),
    ("one request, half the heads", Keys::Codes, (1, 64, each(1)), 8192, (16, 1, 1, 128, 4)),
    ("6 requests, few heads", Keys::Codes, (6, 16, each(1)), 4096, (16, 1, 16, 6, 6)),
    ("32 heads, 4 that differ", Keys::Codes, (4, 32, each(1)), 32768, (16, 1, 1, 128, 8)),
    ("32 heads, 5 that differ", Keys::Codes, (5, 32, each(1)), 32768, (32, 1, 1, 130, 5)),
    ("32 heads, one of any length", Keys::Codes, (1, 32, each(1)), 1 << 20, (16, 1, 1, 132, 2)),
    ("all heads, one of any length, with scales", Keys::ScaledCodes, (1, 128, each(1)), 1 << 20, (64, 2, 1, 66, 1)),
    ("half the heads", Keys::ScaledCodes, (1, 64, each(1)), 1 << 20, (32, 1, 1, 132, 2)),
    ("12 requests of up to 10,000 tokens, half the heads", Keys::Codes, (12, 64, each(1)), 10_000, (64, 1, 1, 132, 12)),
    ("three", Keys::Codes, (3, 64, each(1)), 10_000, (16, 1, 1, 132, 12)),
    ("drafts of 1 to 4 of any length, 24 requests", Keys::Codes, (24, 16, all(60)), 1 << 20, (32, 1, 1, 132, 42)),
    ("drafts of 1 to 4, few heads, two requests", Keys::Pages, (2, 16, all(5)), 1024, (16, 1, 16, 5, 5)),
    ("12 requests", Keys::Pages, (12, 16, all(30)), 2048, (16, 1, 4, 30, 30)),
    ("24 requests", Keys::Pages, (24, 16, all(60)), 1024, (16, 1, 2, 66, 60)),
    ("64 requests", Keys::Pages, (64, 16, all(160)), 4096, (64, 1, 1, 132, 88)),
    ("drafts of 1 to 4, 32 heads, 16 requests", Keys::Pages, (16, 32, all(40)), 512, (16, 1, 1, 132, 80)),
    ("drafts of 1 to 4, all heads", Keys::Pages, (64, 128, all(160)), 4096, (64, 2, 1, 66, 160)),
    ("8 chunks of 16, few heads", Keys::Pages, (8, 16, all(128)), 256, (16, 1, 1, 132, 128)),
    ("32 of them", Keys::Pages, (32, 16, all(512)), 512, (64, 1, 1, 132, 152)),
    ("8 chunks of 512, few heads, of what they bring", Keys::Pages, (8, 16, all(4096)), 512, (64, 2, 1, 66, 519)),
    ("drafts of 1 to 4, few heads", Keys::Codes, (4, 16, all(10)), 512, (16, 1, 4, 10, 10)),
    ("the same with scales, 32 requests", Keys::ScaledCodes, (32, 16, all(80)), 1024, (64, 1, 1, 132, 44)),
    ("drafts of 1 to 4, one-token pages", Keys::Rows, (8, 16, all(20)), 512, (16, 1, 4, 20, 20)),
    ("24 requests of any length", Keys::Codes, (24, 16, each(1)), 8193, (16, 1, 1, 132, 24)),
    ("5 drafts or a short chunk, few heads", Keys::Codes, (128, 16, all(640)), 4096, (64, 1, 1, 132, 256)),
    ("8 chunks, few heads", Keys::Codes, (8, 16, all(4096)), 4096, (64, 2, 1, 66, 519)),
    ("drafts of 1 to 4, few heads, one-token pages, many", Keys::Rows, (96, 16, all(240)), 8192, (64, 1, 1, 132, 132)),
    ("lists, few heads", Keys::Codes, (128, 16, listed(2048, 0)), 0, (16, 1, 1, 132, 128)),
    ("lists, half the heads", Keys::Codes, (8, 64, listed(2048, 0)), 0, (64, 1, 1, 132, 8)),
    ("lists, half the heads, one request", Keys::Codes, (1, 64, listed(2048, 0)), 0, (16, 1, 16, 4, 4)),
    ("lists of two tiles", Keys::Codes, (64, 16, listed(128, 0)), 0, (16, 1, 2, 64, 64)),
    ("80 lists, 32 heads", Keys::Codes, (80, 32, listed(2048, 0)), 0, (32, 1, 1, 132, 80)),
    ("72 short lists, half the heads", Keys::Codes, (72, 64, listed(512, 0)), 0, (64, 1, 1, 132, 72)),
    ("48 requests of one length, or not", Keys::Codes, (48, 16, each(1)), 2048, (16, 1, 2, 66, 48)),
    ("48 shorter ones", Keys::Codes, (48, 16, each(1)), 1984, (16, 1, 2, 66, 48)),
    ("48 short ones, half the heads", Keys::Codes, (48, 64, each(1)), 1024, (32, 1, 1, 132, 96)),
    ("the same with scales", Keys::ScaledCodes, (48, 64, each(1)), 1024, (64, 1, 1, 132, 48)),
    ("short ones with scales, all heads", Keys::ScaledCodes, (12, 128, each(1)), 512, (32, 1, 2, 48, 48)),
    ("lists with scales", Keys::ScaledCodes, (8, 64, listed(2048, 0)), 0, (64, 1, 1, 132, 8)),
    ("24 long requests", Keys::Codes, (24, 16, each(1)), 4096, (16, 1, 1, 120, 24)),
    ("lists of 8 tiles, 12 requests", Keys::Codes, (12, 64, listed(512, 0)), 0, (32, 1, 4, 24, 24)),
    ("32 requests", Keys::Codes, (32, 64, listed(512, 0)), 0, (32, 1, 2, 64, 64)),
    ("64 requests", Keys::Codes, (64, 64, listed(512, 0)), 0, (32, 1, 1, 132, 128)),
    ("lists, all heads", Keys::Codes, (128, 128, listed(2048, 0)), 0, (64, 2, 1, 66, 128)),
    ("two lists", Keys::Codes, (4, 64, listed(128, 512)), 0, (16, 1, 4, 16, 16)),
    ("two lists, 24 requests", Keys::Codes, (24, 64, listed(128, 512)), 0, (64, 1, 1, 132, 24)),
    ("two long lists, all heads", Keys::Codes, (4, 128, listed(128, 1024)), 0, (64, 2, 1, 66, 4)),
    ("two lists, few heads", Keys::Codes, (8, 16, listed(128, 1024)), 0, (16, 1, 8, 8, 8)),
    ("lists of rows, few heads", Keys::Rows, (6, 16, listed(1024, 0)), 0, (16, 1, 16, 6, 6)),
    ("lists of rows, 32 heads", Keys::Rows, (160, 32, listed(2048, 0)), 0, (32, 1, 1, 132, 160)),
    ("lists of rows, all heads", Keys::Rows, (8, 128, listed(512, 0)), 0, (16, 1, 2, 64, 64)),
    ("38 lists of rows, 32 heads", Keys::Rows, (38, 32, listed(2048, 0)), 0, (32, 1, 1, 132, 38)),
    ("56 short ones", Keys::Rows, (56, 32, listed(512, 0)), 0, (32, 1, 2, 56, 56)),
    ("88, half the heads", Keys::Rows, (88, 64, listed(2048, 0)), 0, (64, 1, 1, 132, 88)),
    ("one request of rows", Keys::Rows, (1, 32, each(1)), 4096, (16, 1, 1, 67, 2)),
    ("4 lists of rows", Keys::Rows, (4, 16, listed(2048, 0)), 0, (16, 1, 16, 4, 4)),
    ("half the heads of a list of rows", Keys::Rows, (1, 64, listed(2048, 0)), 0, (16, 1, 16, 4, 4)),
    ("3 requests of rows", Keys::Rows, (3, 16, each(1)), 2048, (16, 1, 16, 3, 3)),
    ("one list of rows", Keys::Rows, (1, 16, listed(2048, 0)), 0, (16, 1, 16, 1, 1)),
    ("2 lists of rows", Keys::Rows, (2, 16, listed(2048, 0)), 0, (16, 1, 16, 2, 2)),
    ("3 lists of rows, short", Keys::Rows, (3, 16, listed(1024, 0)), 0, (16, 1, 16, 3, 3)),
    ("5 lists of rows", Keys::Rows, (5, 16, listed(2048, 0)), 0, (16, 1, 16, 5, 5)),
    ("24 requests of rows", Keys::Rows, (24, 16, each(1)), 8192, (16, 1, 1, 120, 24)),
    ("24 of any length", Keys::Rows, (24, 16, each(1)), 8193, (16, 1, 1, 132, 24)),
    ("24 of any length, 32 heads", Keys::Rows, (24, 32, each(1)), 8193, (32, 1, 1, 132, 24)),
];
