"""``empty_lse``: what ``lse`` is for queries that see no key, whichever kernel and part of it finishes their rows."""

from __future__ import annotations

import pytest
import torch

import ferromla
import ferromla.torch_ops
import problems
import problems_sparse

INF = float("inf")
FORMATS = [None, "fp8", "fp8_v32"]


def _check(problem, **options):
    """Rows without keys have it, all else is as without; there are some of both."""
    *results, lse = problem.run(**options, empty_lse=7.5)
    *want, plain = problem.run(**options)
    empty = torch.isneginf(plain)
    assert 0 < int(empty.sum()) < empty.numel()
    assert torch.equal(lse, plain.masked_fill(empty, 7.5))
    for result, other in zip(results, want, strict=True):
        assert torch.equal(result, other)
    assert bool((results[0][empty] == 0).all())


@pytest.mark.parametrize("num_splits", [None, 1, 2, 5])
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("h", [8, 32, 128])
def test_decode(device, h, kv_format, num_splits):
    """A request without tokens, and query tokens before the first one."""
    problem = problems.make(lens=[700, 0, 2, 130], s_q=3, h=h, device=device)
    problem = problem if kv_format is None else problem.quantised(kv_format)
    _check(problem, num_splits=num_splits)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_parts_of_tokens_that_are_absent(device, kv_format):
    """All pages of a request are absent: it has parts, none of which sees a key."""
    problem = problems.make(lens=[2000, 2000], h=16, device=device)
    problem = problem if kv_format is None else problem.quantised(kv_format)
    problem.table[1] = -1
    _check(problem)
    _check(problem, num_splits=4)


@pytest.mark.parametrize("h", [16, 64])
def test_prefill(device, h):
    _check(problems.make(lens=[300, 0, 5], q_lens=[70, 2, 9], h=h, device=device))


def _lists(problem, keys):
    for each in keys:
        each.lens.view(-1)[::3] = 0
    return problem


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_v32", "fp8_v4", "fp8_v41"])
@pytest.mark.parametrize("h", [8, 64, 128])
def test_sparse_decode(device, h, kv_format):
    d_qk = 576 if kv_format in ("bf16", "fp8_v32") else 512
    problem = problems_sparse.decode(h=h, topk=700, extra=(200, 70, 64), lens="row", d_qk=d_qk, device=device)
    problem.main, problem.extra = problem.main.quantised(kv_format), problem.extra.quantised(kv_format)
    problem = _lists(problem, (problem.main, problem.extra))
    for num_splits in (None, 1, 3):
        _check(problem, num_splits=num_splits)


@pytest.mark.parametrize("h", [8, 64])
def test_sparse_prefill(device, h):
    problem = problems_sparse.prefill(h=h, lens="row", device=device)
    _check(_lists(problem, (problem.keys,)))


def test_torch_operators_take_it():
    problem = problems.make(lens=[70, 0], h=16)
    inputs = problem.q, problem.cache, problem.table, problem.lens
    lse = torch.ops.ferromla.decode(*inputs, empty_lse=INF)[1]
    assert torch.isposinf(lse).any(-1).flatten().tolist() == [False, True]


def test_infinity_is_nothing_to_merge():
    """The default: what merges with other keys as nothing."""
    problem = problems.make(lens=[0, 70], h=16)
    out, lse = problem.run()
    merged = ferromla.merge_states(out, lse, out.flip(0), lse.flip(0))
    assert torch.equal(merged[0][0], out[1])
    assert torch.equal(merged[1][0], lse[1])


def test_what_is_no_number_is_refused():
    with pytest.raises(ferromla.InvalidArgument, match="empty_lse is NaN: a number, or an infinity"):
        problems.make(lens=[0, 70], h=16).run(empty_lse=problems.NAN)
