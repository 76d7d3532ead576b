"""Units in many parts: each way of adding them up. Those of 64 rows are kept as halves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ferromla
import problems
import problems_sparse
import tolerance

# Up to 4, 8 and 16 parts, as many as have a piece each, and more.
PARTS = [3, 4, 5, 8, 9, 16, 17, 32, 33, 66]


@pytest.mark.gpu
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("s_q", "heads", "dtype"), [(1, 64, "bfloat16"), (1, 100, "float16"), (3, 33, "bfloat16")])
def test_many_parts_are_right_and_the_same_each_time(cuda, parts, s_q, heads, dtype):
    lens = [64 * parts, 64 * parts - 63, 64 * parts + 17, 64]
    problem = problems.make(lens=lens, s_q=s_q, h=heads, dtype=getattr(torch, dtype), device=cuda)
    problem.check_repeats(5, num_splits=parts, attn_sink=torch.linspace(-1, 1, heads, device=cuda))


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [4, 5, 32, 33, 64, 65, 100, 128, 129, 150])
@pytest.mark.parametrize(
    ("s_q", "heads", "dtype"),
    [
        *((1, 16, "bfloat16"), (2, 16, "float16"), (3, 5, "bfloat16")),
        *((1, 64, "bfloat16"), (2, 50, "float16"), (1, 128, "bfloat16")),
    ],
)
def test_pieces_of_many_parts_are_right_and_the_same_each_time(cuda, parts, s_q, heads, dtype):
    # Of one request each CTA adds up its piece; with more of them CTAs have more items, and leave theirs to the last.
    for lens in ([64 * parts - 5], [64 * parts, 64 * parts - 63, 64 * parts + 17, 64]):
        problem = problems.make(lens=lens, s_q=s_q, h=heads, dtype=getattr(torch, dtype), device=cuda)
        plan = ferromla.Plan(problem.lens, num_heads=heads, q_len=s_q, page_size=64, num_splits=parts)
        problem.check_repeats(3, plan=plan, attn_sink=torch.linspace(-1, 1, heads, device=cuda))


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [5, 32, 33, 64, 70])
@pytest.mark.parametrize(("requests", "heads"), [(10, 16), (20, 16), (10, 32), (40, 16)])
def test_many_parts_that_clusters_have_are_right_and_the_same_each_time(cuda, parts, requests, heads):
    # So many units have clusters of eight, four and two, which share the tiles of a part.
    lens = [64 * parts - 5 * i for i in range(requests)]
    problem = problems.make(lens=lens, h=heads, device=cuda)
    problem.check_repeats(2, num_splits=parts, attn_sink=torch.linspace(-1, 1, heads, device=cuda))


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [4, 32, 33, 64, 100, 129])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("kv_format", ["fp8", "fp8_v32"])
def test_pieces_of_many_parts_of_codes_are_right_and_the_same_each_time(cuda, parts, heads, kv_format):
    for lens in ([64 * parts - 5], [64 * parts, 64 * parts - 63, 64 * parts + 17, 64]):
        problem = problems.make(lens=lens, h=heads, device=cuda).quantised(kv_format)
        plan = ferromla.Plan(problem.lens, num_heads=heads, page_size=64, num_splits=parts, kv_format=kv_format)
        problem.check_repeats(3, plan=plan, attn_sink=torch.linspace(-1, 1, heads, device=cuda))


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [33, 64, 100, 129])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize(("kv_format", "d_qk"), [("bf16", 576), ("fp8_v32", 576), ("fp8_v41", 512)])
def test_many_parts_of_lists_are_right(cuda, parts, heads, kv_format, d_qk):
    shape = {"b": 2, "s_q": 1, "h": heads, "s_k": 20000, "topk": 64 * 129, "lens": "row", "d_qk": d_qk}
    problem = problems_sparse.decode(**shape, device=cuda)
    problem = replace(problem, main=problem.main.quantised(kv_format))
    for _ in range(2):
        problem.check(num_splits=parts)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_one_long_request_among_short_ones_is_right_whatever_was_planned_before(cuda, heads):
    short = [64 * (1 + i) for i in range(4)]
    lens = [[*short, length, *short] for length in (64 * 500 + 3, 64 * 200, 64, 64 * 600 - 1)]
    layers = [problems.make(lens=one, h=heads, device=cuda) for one in lens]
    plan = ferromla.Plan(layers[-1].lens, num_heads=heads, page_size=64, max_seq_len=64 * 600)
    for _ in range(2):
        for layer in layers:
            plan.update(layer.lens)
            layer.check_repeats(2, plan=plan)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [3, 20, 40])
def test_columns_of_very_different_sizes_keep_their_bits(cuda, parts):
    problem = problems.make(lens=[64 * parts] * 2, h=64, device=cuda)
    size = 2.0 ** -(torch.arange(576, device=cuda) * 7 % 15).where(torch.arange(576, device=cuda) < 512, 0)
    columns = size[:512].double()
    problem = replace(
        problem,
        q=(problem.q / size).to(problem.q.dtype),
        cache=(problem.cache * size).to(problem.cache.dtype),
        keys=(problem.keys * size).to(problem.keys.dtype),
    )
    out, lse = problem.run(num_splits=parts)
    want, want_lse = problem.expected()
    tolerance.check((out / columns).to(out.dtype), lse, want / columns, want_lse)
