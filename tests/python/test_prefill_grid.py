"""Prefill against the float64 reference over a grid: a covering sample on a CPU, several larger ones on a GPU."""

from __future__ import annotations

import functools

import pytest
import torch

import covering
import ferromla
import problems
import tolerance

# How many query tokens a request of ``len`` cached tokens has.
QUERIES = {
    "one": lambda len_, r: 1,
    "mixed": lambda len_, r: (1, 0, 2, 5, 17, 0, 3)[r % 7],
    "below": lambda len_, r: len_ // 2,
    "equal": lambda len_, r: len_,
    "above": lambda len_, r: len_ + 3,
}
AXES = {
    "b": (1, 2, 6, 64),
    "queries": tuple(QUERIES),
    "seq": (1, 20, 140, 4096),
    "heads": tuple((h, g) for h in (1, 3, 9, 16, 63, 64, 126, 128) for g in (1, 2, 3) if h % g == 0),
    "varlen": (False, True),
    "causal": (True, False),
    "page_size": (1, 16, 61, 64, 256),
    "dtype": (torch.bfloat16, torch.float16),
    "d_qk": (576, 512),
}
# Most query tokens of one request: longer chunks have tests of their own.
LONGEST = 160
# Numbers that the reference touches for one case, by rows of 512.
CPU_COST_LIMIT = 700_000
GPU_COST_LIMIT = 60_000_000


def _cost(case: tuple) -> int:
    b, queries, seq, (h, h_kv), *_ = case
    rows = sum(min(QUERIES[queries](seq, r), LONGEST) for r in range(b)) * h
    return rows * (seq + 100) + 8 * b * seq * h_kv


def _name(case: tuple) -> str:
    b, queries, seq, (h, h_kv), varlen, causal, page_size, dtype, d_qk = case
    kind = f"{'varlen' if varlen else 'even'}-{'causal' if causal else 'full'}-{str(dtype)[6:]}"
    return f"b{b}-{queries}-seq{seq}-h{h}-hkv{h_kv}-{kind}-page{page_size}-d{d_qk}"


def _problem(case: tuple, device="cpu"):
    b, queries, seq, (h, h_kv), varlen, causal, page_size, dtype, d_qk = case
    seed = b + seq + h
    lens = problems.lengths(b, seq, varlen, torch.Generator().manual_seed(seed)).tolist()
    q_lens = [min(QUERIES[queries](length, r), LONGEST) for r, length in enumerate(lens)]
    return problems.make(
        h=h,
        h_kv=h_kv,
        lens=lens,
        q_lens=q_lens,
        page_size=page_size,
        dtype=dtype,
        d_qk=d_qk,
        seed=seed,
        device=device,
        causal=causal,
    )


SAMPLE = covering.sample(AXES, lambda case: _cost(case) <= CPU_COST_LIMIT)


def test_the_cpu_sample_holds_every_value_of_every_axis():
    for axis, values in enumerate(AXES.values()):
        assert {case[axis] for case in SAMPLE} == set(values)


@pytest.mark.parametrize("case", SAMPLE, ids=_name)
def test_cpu_sample_matches_reference(case):
    _problem(case).check()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_gpu_samples_match_reference(seed, cuda):
    sample = covering.sample(AXES, lambda case: _cost(case) <= GPU_COST_LIMIT, seed)

    def cases():
        for case in sample:
            problem = _problem(case, cuda)
            compared = *problem.run(), *problem.expected(**problem.options)
            yield _name(case), tolerance.all_near(*compared), functools.partial(tolerance.faults, *compared)

    tolerance.check_cases(cases)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "fp8_v32"])
@pytest.mark.parametrize(("h", "tokens", "b"), [(64, 3, 100), (16, 20, 60), (128, 4, 40), (64, 6, 50), (128, 1, 140)])
def test_many_requests_with_as_many_tokens_each(h, tokens, b, kv_format, cuda):
    """Where that is known they are laid out as those of a decode are; results are right where it is wrong, too."""
    generator = torch.Generator().manual_seed(h + tokens)
    lens = problems.lengths(b, 900, True, generator).tolist()
    lens[:4] = 0, 1, tokens, 64
    others = torch.randint(b, (b * tokens,), generator=generator).bincount(minlength=b)
    for q_lens in ([tokens] * b, others.tolist()):
        problem = problems.make(lens=lens, q_lens=q_lens, h=h, device=cuda)
        problem = problem if kv_format == "bf16" else problem.quantised(kv_format)
        problem.check(max_q_len=tokens)
        bound = problem.table.shape[1] * problem.cache.shape[1]
        shapes = {"num_heads": h, "page_size": problem.cache.shape[1], "qo_indptr": problem.indptr}
        shapes |= {"num_tokens": b * tokens, "kv_format": kv_format, "max_q_len": tokens, "max_seq_len": bound}
        problem.check(plan=ferromla.Plan(problem.lens, **shapes))
