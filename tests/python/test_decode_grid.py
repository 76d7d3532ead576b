"""Decode against the float64 reference over the whole grid: all of it on a GPU, a covering sample on a CPU."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import covering
import ferromla
import problems
import reference
import tolerance

AXES = {
    "b": (1, 2, 6, 64),
    "s_q": (1, 2, 4),
    "seq": (1, 20, 140, 4096),
    "heads": tuple((h, g) for h in (1, 3, 9, 16, 63, 64, 126, 128) for g in (1, 2, 3) if h % g == 0),
    "varlen": (False, True),
    "causal": (False, True),
    "page_size": (1, 16, 61, 64, 256),
    "dtype": (torch.bfloat16, torch.float16),
}
# Query rows times keys that the CPU sample spends on one case: about half a second on two cores.
CPU_COST_LIMIT = 1_100_000


def _cost(case: tuple) -> int:
    b, s_q, seq, (h, _), *_ = case
    return b * s_q * seq * h


def _name(case: tuple) -> str:
    b, s_q, seq, (h, h_kv), varlen, causal, page_size, dtype = case
    kind = f"{'varlen' if varlen else 'even'}-{'causal' if causal else 'full'}-{str(dtype)[6:]}"
    return f"b{b}-sq{s_q}-seq{seq}-h{h}-hkv{h_kv}-{kind}-page{page_size}"


SAMPLE = covering.sample(AXES, lambda case: _cost(case) <= CPU_COST_LIMIT)


def test_the_cpu_sample_holds_every_value_of_every_axis():
    for axis, values in enumerate(AXES.values()):
        assert {case[axis] for case in SAMPLE} == set(values)


@pytest.mark.parametrize("case", SAMPLE, ids=_name)
def test_cpu_sample_matches_reference(case):
    b, s_q, seq, (h, h_kv), varlen, causal, page_size, dtype = case
    problem = problems.make(
        b, s_q, h, h_kv=h_kv, seq=seq, varlen=varlen, page_size=page_size, dtype=dtype, seed=sum(case[:3]) + h
    )
    problem.check(causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", AXES["dtype"], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("seq", AXES["seq"])
@pytest.mark.parametrize("s_q", AXES["s_q"])
@pytest.mark.parametrize("b", AXES["b"])
def test_gpu_whole_cross_matches_reference(b, s_q, seq, dtype, cuda):
    """The cross of the other axes, with caches and references shared where they are the same."""
    assert tolerance.check_cases(functools.partial(_cross, b, s_q, seq, dtype, cuda)) == 320


def _cross(b, s_q, seq, dtype, cuda):
    """The cases as ``tolerance.check_cases`` takes them."""
    for h_kv, varlen in itertools.product((1, 2, 3), AXES["varlen"]):
        seed = b * 1000 + seq + h_kv
        generator, drawn = torch.Generator().manual_seed(seed), problems.drawing(seed, cuda)
        lens = problems.lengths(b, seq, varlen, generator)
        keys = problems.random_keys(b, seq, h_kv, 576, **drawn).to(dtype)
        lens_there = lens.to(cuda)
        present = torch.arange(seq, device=cuda) < lens_there[:, None]
        calls = []
        for (h, g), causal in itertools.product(AXES["heads"], AXES["causal"]):
            if g == h_kv:
                q = problems.random_queries(b, s_q, h, 576, **drawn).to(dtype)
                calls.append((q, causal, reference.attention(q, keys, present, lens_there, causal=causal)))
        for size in AXES["page_size"]:
            cache, table = problems.page(keys, lens, size, generator)
            for q, causal, want in calls:
                out, lse = problems.poisoned_outputs(q)
                ferromla.decode(q, cache, table, lens_there, causal=causal, out=out, lse=lse)
                name = _name((b, s_q, seq, (q.shape[2], h_kv), varlen, causal, size, dtype))
                compared = out, lse, *want
                yield name, tolerance.all_near(*compared), functools.partial(tolerance.faults, *compared)
