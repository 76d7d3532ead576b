"""What rounding leaves: scores must not lean to one side, and rows must not be off as a whole."""

from __future__ import annotations

import math

import pytest
import torch

import ferromla
import problems
import tolerance

REQUESTS, PAGE_SIZE = 512, 64
# Of a score, on average. Tensor cores cut sums toward zero: a score that is one sum of 36 steps would be 4e-7 to 6e-7
# off in bf16, 5e-7 to 13e-7 in fp16.
MOST_LEAN = {torch.bfloat16: 2.5e-7, torch.float16: 4.6e-7}


@pytest.mark.parametrize("along", [False, True], ids=["random", "along"])
@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("width", [576, 512])
@pytest.mark.parametrize("dtype", MOST_LEAN, ids=["bf16", "fp16"])
def test_scores_of_single_keys_do_not_lean(device, dtype, width, heads, along):
    options = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    cache = torch.randn(REQUESTS, PAGE_SIZE, width, **options).to(dtype)
    q = torch.randn(REQUESTS, 1, heads, width, **options)
    if along:  # half of the query is the key: all products have one sign
        q = q * 0.5 + cache[:, :1, None].float() * 0.3
    q = q.to(dtype)
    table = torch.arange(REQUESTS, device=device, dtype=torch.int32)[:, None]
    _, lse = ferromla.decode(q, cache, table, torch.ones_like(table[:, 0]))
    scores = torch.einsum("bqhd,bd->bqh", q.double(), cache[:, 0].double()) / math.sqrt(width)
    lean = ((lse.double() - scores) * scores).sum() / scores.square().sum()
    assert abs(float(lean)) <= MOST_LEAN[dtype]


@pytest.mark.parametrize("heads", [1, 16, 32, 128])
@pytest.mark.parametrize("lists", [False, True], ids=["pages", "lists"])
@pytest.mark.parametrize("dtype", MOST_LEAN, ids=["bf16", "fp16"])
def test_rows_of_late_keys_are_right_one_by_one(device, dtype, lists, heads):
    """A key that comes in a later tile than what its row's weights are relative to has a weight that 16 bits round; the
    row must be divided by what it was multiplied with."""
    requests, tokens, first, late = 128, 128, 5, 100
    options = {"generator": torch.Generator(device).manual_seed(1), "device": device}
    tilts = torch.full((requests, tokens), 10.0, device=device)
    tilts[:, first] = 60
    tilts[:, late] = 60 + torch.rand(requests, **options) * 5
    rows = problems.random_keys(requests * tokens, 1, 576, **options)
    cache = problems.tilted_keys(rows, tilts.flatten()).to(dtype).view(requests * 2, PAGE_SIZE, 576)
    q = problems.tilted_queries(problems.random_queries(requests, 1, heads, 576, **options)).to(dtype)
    if lists:
        indices = torch.arange(requests * tokens, device=device, dtype=torch.int32).view(requests, 1, tokens)
        out, _ = ferromla.sparse_decode(q, cache, indices)
    else:
        table = torch.arange(2 * requests, device=device, dtype=torch.int32).view(requests, 2)
        out, _ = ferromla.decode(q, cache, table, torch.full_like(table[:, 0], tokens))
    keys = cache.double().view(requests, tokens, 576)
    weights = torch.einsum("bqhd,bkd->bqhk", q.double(), keys).div(math.sqrt(576)).softmax(-1)
    want = torch.einsum("bqhk,bkd->bqhd", weights, keys[..., :512])
    angles = torch.vmap(torch.vmap(tolerance.angle_error))(out.double().flatten(0, 1), want.flatten(0, 1))
    assert float(angles.max()) <= tolerance.ATTENTION.angle
