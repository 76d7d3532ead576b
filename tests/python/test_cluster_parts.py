"""Clusters of CTAs that share a unit's tiles, whose results are merged, and teams of CTAs that have its rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import problems
import tolerance

# Clusters of 16, 8, 4 and 2 with 16 heads. In the last four batches a unit is cut for several clusters: of 8 over fp8,
# of 4 over codes, of 2 over pages of one token and fp8, and of 2 over whole 16-bit pages, as the bound is a loose one.
BATCHES = [
    [1024],
    [700, 1000],
    [1024, 577, 800, 1, 0, 640],
    [3000] * 6,
    [3072, 100, 2000],
    [8192, 5000, 3, 0, 7000, 640],
    [512],
    [300] * 8,
    [300] * 30,
    [128],
    [1024] * 40,
    [4000] * 30,
    [8192] + [200] * 13,
    [4096] + [200] * 27,
    [2048, 1500] + [100] * 46,
    [9000] + [200] * 40,
]
each_batch = pytest.mark.parametrize("lens", BATCHES, ids=[f"{len(lens)}x{lens[0]}" for lens in BATCHES])
each_cache = pytest.mark.parametrize(("kv_format", "page_size"), [(None, 64), (None, 1), ("fp8", 64), ("fp8_v32", 64)])


def _problem(lens, **shape):
    """The block table has no column to spare: it bounds lengths, by which clusters are chosen."""
    problem = problems.make(lens=lens, **shape)
    needed = -(-max(lens) // shape["page_size"])
    return replace(problem, table=problem.table[:, :needed].contiguous())


@pytest.mark.gpu
@each_batch
@each_cache
@pytest.mark.parametrize(("s_q", "heads"), [(1, 16), (2, 5), (1, 32)])
def test_right_and_the_same_each_time(cuda, lens, kv_format, page_size, s_q, heads):
    problem = _problem(lens, s_q=s_q, h=heads, page_size=page_size, device=cuda)
    if kv_format is not None:
        problem = problem.quantised(kv_format)
    problem.check_repeats(5, attn_sink=torch.linspace(-1, 1, heads, device=cuda))


@pytest.mark.gpu
@each_batch
@pytest.mark.parametrize("page_size", [64, 1])
@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_columns_of_different_size(cuda, dtype, heads, page_size, lens):
    """Columns of V from 2^-9 to 2^9, each right by itself; those of Q are one over it."""
    problem = _problem(lens, h=heads, page_size=page_size, dtype=dtype, device=cuda)
    size = torch.randint(-9, 10, (512,), **problems.drawing(len(lens), cuda)).float().exp2()
    wide = torch.cat([size, torch.ones(64, device=cuda)])
    problem = replace(
        problem,
        q=(problem.q / wide).to(dtype),
        cache=(problem.cache * wide).to(dtype),
        keys=(problem.keys * wide).to(dtype),
    )
    out, lse = problem.run()
    want, want_lse = problem.expected()
    tolerance.check((out.double() / size).to(dtype), lse, want / size, want_lse)


# With 16 heads clusters of 16, 8, 4, 2, 2 (of 4 with 32 query rows over others than whole 16-bit pages) and 16, then
# single CTAs of 64 rows; with other heads single ones of 16 and 32, too.
DRAFTS = [
    [(1024, 1), (300, 4)],
    [(500, 3), (512, 2), (3, 3), (0, 0), (77, 1)],
    [(512, 1), (256, 4), (300, 2)] * 4,
    [(1024, 1), (900, 2), (2, 2), (640, 4)] * 6,
    [(1000, 1), (1024, 4)] * 8,
    [(4096, 4), (2000, 1), (1, 1)],
    [(1024, 3)] * 40,
]


@pytest.mark.gpu
@pytest.mark.parametrize("requests", DRAFTS, ids=[f"{len(requests)}x{requests[0][0]}" for requests in DRAFTS])
@each_cache
@pytest.mark.parametrize("heads", [5, 16, 32, 128])
def test_drafts_of_different_numbers(cuda, requests, kv_format, page_size, heads):
    """Requests of different numbers of query tokens, each with more rows than a CTA of 16, or fewer."""
    lens, q_lens = zip(*requests, strict=True)
    problem = _problem(lens, q_lens=q_lens, h=heads, page_size=page_size, device=cuda)
    if kv_format is not None:
        problem = problem.quantised(kv_format)
    problem.check_repeats(3, attn_sink=torch.linspace(-1, 1, heads, device=cuda))


@pytest.mark.gpu
@pytest.mark.parametrize(("s_q", "heads"), [(5, 128), (9, 64), (11, 64), (18, 64), (6, 126)])
@each_cache
def test_teams_of_three_to_six(cuda, s_q, heads, kv_format, page_size):
    """More rows than a team of eight CTAs has: teams of 5, 3, 4, 6 and 4. One of the third has no rows."""
    problem = _problem([700, 64, 3000, 3, 0], s_q=s_q, h=heads, page_size=page_size, device=cuda)
    if kv_format is not None:
        problem = problem.quantised(kv_format)
    problem.check_repeats(2, attn_sink=torch.linspace(-1, 1, heads, device=cuda))
