"""Units in two or three parts: whichever of the CTAs adds them up, or half of them, the result is the same."""

from __future__ import annotations

import pytest
import torch

import problems

REQUESTS = 150  # more parts than CTAs: some have further items


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_format", "page_size"), [(None, 64), (None, 1), ("fp8", 64), ("fp8_v32", 64)])
@pytest.mark.parametrize(("s_q", "heads"), [(1, 1), (1, 16), (2, 10), (1, 32)])
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_are_right_and_the_same_each_time(cuda, parts, s_q, heads, kv_format, page_size):
    lens = [65 + 37 * i % 400 for i in range(REQUESTS)]
    problem = problems.make(lens=lens, s_q=s_q, h=heads, page_size=page_size, device=cuda)
    if kv_format is not None:
        problem = problem.quantised(kv_format)
    problem.check_repeats(20, num_splits=parts, attn_sink=torch.linspace(-1, 1, heads, device=cuda))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", [None, "fp8_v32"])
@pytest.mark.parametrize("parts", [2, 3])
def test_a_part_of_which_no_row_sees_a_key_is_added_up_too(cuda, parts, kv_format):
    problem = problems.make(lens=[70, 130, 64, 6], s_q=8, h=4, device=cuda)
    if kv_format is not None:
        problem = problem.quantised(kv_format)
    problem.check(num_splits=parts)


# Sinks are as large as lse, whose last bit is then seen in some of three million results. Which of two CTAs ends first
# changes from call to call with so many units for the workers, and not with twice as many.
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_rows_are_the_same_each_time(cuda, dtype):
    problem = problems.make(lens=[78, 112, 117], s_q=16, h=128, dtype=dtype, device=cuda)
    problem.check_repeats(200, num_splits=2, causal=False, attn_sink=torch.linspace(2, 8, 128, device=cuda))
