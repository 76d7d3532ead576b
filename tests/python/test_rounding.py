"""What sums of products are off by must not lean to one side: a score is as often too high as too low."""

from __future__ import annotations

import math

import pytest
import torch

import ferromla

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
