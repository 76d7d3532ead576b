"""FlashInfer's wrapper: pages one after another, its logarithms, its buffers for graphs, against float64."""

from __future__ import annotations

import math

import pytest
import torch

import ferromla
import problems
import tolerance
from ferromla.compat import flashinfer

PAGE = 64


def _problem(device, q_lens, lens, **options):
    """A prefill whose queries and cache come in two parts."""
    options = {"h": 16, "page_size": PAGE} | options
    return problems.make(q_lens=q_lens, lens=lens, device=device, **options)


def _pages(problem):
    """Page numbers of all requests one after another, and where each begins."""
    page_size = problem.cache.shape[1]
    counts = -(-problem.lens.long() // page_size)
    used = torch.arange(problem.table.shape[1], device=counts.device) < counts[:, None]
    zero = counts.new_zeros(1)
    return torch.cat([zero, counts.cumsum(0)]).int(), problem.table[used]


def _plan(wrapper, problem, *, causal=True, scale=0.05, **changes):
    kv_indptr, kv_indices = _pages(problem)
    given = {
        "qo_indptr": problem.indptr,
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "kv_len_arr": problem.lens,
        "num_heads": problem.q.shape[1],
        "head_dim_ckv": 512,
        "head_dim_kpe": 64,
        "page_size": problem.cache.shape[1],
        "causal": causal,
        "sm_scale": scale,
        "q_data_type": problem.q.dtype,
        "kv_data_type": problem.cache.dtype,
    }
    wrapper.plan(**given | changes)


def _parts(problem):
    return problem.q[..., :512], problem.q[..., 512:], problem.cache[..., :512], problem.cache[..., 512:]


def _wrapper(device, **options):
    return flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(16, dtype=torch.uint8, device=device), **options)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1], [3, 0, 40, 1]])
def test_matches_the_reference(device, q_lens, causal, page_size):
    problem = _problem(device, q_lens, [300, 0, 130, 64], page_size=page_size)
    wrapper = _wrapper(device)
    _plan(wrapper, problem, causal=causal)
    want = problem.expected(causal=causal, softmax_scale=0.05)
    tolerance.check(*wrapper.run(*_parts(problem), return_lse=True, return_lse_base_on_e=True), *want)
    out, lse = wrapper.run(*_parts(problem), return_lse=True)
    tolerance.check(out, lse / math.log2(math.e), *want)
    assert torch.equal(wrapper.run(*_parts(problem)), out)


def test_outputs_that_are_given_are_written(device):
    problem = _problem(device, [2, 1], [70, 5])
    wrapper = _wrapper(device, backend="fa3")
    _plan(wrapper, problem)
    out, lse = problems.poisoned_outputs(problem.q)
    got = wrapper.run(*_parts(problem), out=out, lse=lse, return_lse=True, return_lse_base_on_e=True)
    assert got[0] is out
    assert got[1] is lse
    tolerance.check(out, lse, *problem.expected(softmax_scale=0.05))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(("on_e", "factor"), [(False, math.log2(math.e)), (True, 1.0)])
def test_a_given_lse_has_its_base_also_where_it_is_not_returned(device, return_lse, on_e, factor):
    problem = _problem(device, [2, 1, 3], [70, 0, 5])
    wrapper = _wrapper(device)
    _plan(wrapper, problem)
    out, lse = problems.poisoned_outputs(problem.q)
    wrapper.run(*_parts(problem), out=out, lse=lse, return_lse=return_lse, return_lse_base_on_e=on_e)
    tolerance.check(out, lse / factor, *problem.expected(softmax_scale=0.05))


def test_a_plan_replaces_the_one_before(device):
    wrapper = _wrapper(device)
    for seed, lens in ((1, [300, 0, 64]), (2, [5, 900, 64])):
        problem = _problem(device, [1, 4, 2], lens, seed=seed)
        _plan(wrapper, problem)
        got = wrapper.run(*_parts(problem), return_lse=True, return_lse_base_on_e=True)
        tolerance.check(*got, *problem.expected(softmax_scale=0.05))


def test_no_requests(device):
    wrapper = _wrapper(device)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    wrapper.plan(zero, zero, none, none, 16, 512, 64, PAGE, True, 0.05, torch.bfloat16, torch.bfloat16)
    q, cache = torch.zeros(0, 16, 576).bfloat16().to(device), torch.zeros(2, PAGE, 576).bfloat16().to(device)
    out = wrapper.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:])
    assert out.shape == (0, 16, 512)


def _buffers(device, requests=3, pages=48):
    integers = lambda n: torch.zeros(n, dtype=torch.int32, device=device)  # noqa: E731
    return {
        "use_cuda_graph": True,
        "qo_indptr": integers(requests + 1),
        "kv_indptr": integers(requests + 1),
        "kv_indices": integers(pages),
        "kv_len_arr": integers(requests),
    }


@pytest.mark.gpu
def test_a_graph_replays_after_other_plans(cuda):
    """Lengths grow, shrink to none and move to other pages while the captured call stays; a query token is missing."""
    given = ([1, 1, 1], (900, 0, 64)), ([1, 1, 1], (5, 1024, 640)), ([1, 0, 1], (700, 20, 3)), ([1, 1, 1], (0, 0, 1))
    steps = [_problem(cuda, q_lens, lens, seed=seed) for seed, (q_lens, lens) in enumerate(given)]
    pages = max(len(step.cache) for step in steps)
    q, cache = torch.zeros_like(steps[0].q), steps[0].cache.new_zeros(pages, PAGE, 576)
    parts = q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:]
    wrapper = _wrapper(cuda, **_buffers(cuda))
    _plan(wrapper, steps[0])
    run = lambda: wrapper.run(*parts, return_lse=True, return_lse_base_on_e=True)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run()
    for step in (*steps, steps[0]):
        _plan(wrapper, step)
        tokens = len(step.q)
        q[:tokens].copy_(step.q), cache[: len(step.cache)].copy_(step.cache)
        graph.replay()
        tolerance.check(out[:tokens], lse[:tokens], *step.expected(softmax_scale=0.05))


def test_a_later_plan_may_have_fewer_query_tokens(device):
    """Whose rows are not written."""
    wrapper = _wrapper(device, **_buffers(device))
    _plan(wrapper, _problem(device, [2, 2, 2], [64, 64, 64]))
    fewer = _problem(device, [1, 0, 2], [70, 5, 64], seed=1)
    _plan(wrapper, fewer)
    whole = _problem(device, [2, 2, 2], [70, 5, 64], seed=1)
    whole.q[:3] = fewer.q
    out, lse = problems.poisoned_outputs(whole.q)
    parts = *_parts(whole)[:2], *_parts(fewer)[2:]
    wrapper.run(*parts, out=out, lse=lse, return_lse=True, return_lse_base_on_e=True)
    tolerance.check(out[:3], lse[:3], *fewer.expected(softmax_scale=0.05))
    assert bool(out[3:].isnan().all())


@pytest.mark.parametrize(
    ("q_lens", "lens", "changes", "match"),
    [
        ([1, 1], [5, 5], {}, "kv_len_arr is of 2 requests: must be of 3"),
        ([1, 1, 1], [17 * PAGE, 0, 0], {}, "kv_indptr is of a request of 17 pages: must be 16 at most"),
        ([1, 2, 1], [64, 64, 64], {}, "qo_indptr is of 4 query tokens"),
        ([2, 0, 1], [64, 64, 64], {}, "qo_indptr is of 3 query tokens, 2 of one request: must be of 3 at most, and 1"),
        ([1, 1, 1], [64, 64, 64], {"causal": False}, "must be those of the first plan"),
    ],
)
def test_what_a_graph_has_no_room_for_is_refused(q_lens, lens, changes, match):
    wrapper = _wrapper("cpu", **_buffers("cpu"))
    first = _problem("cpu", [1, 1, 1], [64, 64, 64])
    _plan(wrapper, first)
    with pytest.raises(ferromla.InvalidArgument, match=match):
        _plan(wrapper, _problem("cpu", q_lens, lens), **changes)
    got = wrapper.run(*_parts(first), return_lse=True, return_lse_base_on_e=True)
    tolerance.check(*got, *first.expected(softmax_scale=0.05))


def _integers(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"head_dim_ckv": 256}, ferromla.Unsupported, "head_dim_ckv is 256: must be 512"),
        ({"head_dim_kpe": 0}, ferromla.Unsupported, "head_dim_kpe is 0: must be 64"),
        ({"kv_data_type": torch.float8_e4m3fn}, ferromla.Unsupported, r"kv_data_type is torch\.float8_e4m3fn"),
        ({"use_profiler": True}, ferromla.Unsupported, "use_profiler is True"),
        ({"qo_indptr": _integers(0, 1)}, ferromla.InvalidArgument, "qo_indptr is of 2 entries: must have 3"),
        ({"qo_indptr": _integers(0, 3, 1)}, ferromla.InvalidArgument, r"qo_indptr is \[0, 3, 1\]"),
        ({"kv_indices": _integers(1, 2)[None]}, ferromla.InvalidArgument, r"kv_indices is of shape \[1, 2\]"),
        ({"kv_indptr": _integers(1, 2, 3)}, ferromla.InvalidArgument, r"kv_indptr is \[1, 2, 3\]: must begin with 0"),
        ({"kv_indptr": _integers(0, 2, 9)}, ferromla.InvalidArgument, "kv_indptr is ending with 9: must end with 3"),
        (
            {"kv_len_arr": _integers(70, 65)},
            ferromla.InvalidArgument,
            "kv_len_arr is 65: must be 64 at most for request 1",
        ),
        ({"num_heads": 0}, ferromla.InvalidArgument, "num_heads"),
        ({"page_size": 0}, ferromla.InvalidArgument, "page_size is 0: must be 1 at least"),
    ],
)
def test_bad_arguments_are_refused_by_name_and_the_plan_before_stays(changes, kind, match):
    problem = _problem("cpu", [2, 1], [70, 5])
    wrapper = _wrapper("cpu")
    _plan(wrapper, problem)
    with pytest.raises(kind, match=match):
        _plan(wrapper, problem, **changes)
    got = wrapper.run(*_parts(problem), return_lse=True, return_lse_base_on_e=True)
    tolerance.check(*got, *problem.expected(softmax_scale=0.05))


def test_what_has_no_plan_or_is_of_other_kernels_is_refused():
    wrapper = _wrapper("cpu")
    problem = _problem("cpu", [2, 1], [70, 5])
    with pytest.raises(ferromla.InvalidArgument, match="run is called before plan"):
        wrapper.run(*_parts(problem))
    _plan(wrapper, problem)
    with pytest.raises(ferromla.Unsupported, match="page_table is of type Tensor"):
        wrapper.run(*_parts(problem), page_table=problem.table)
    with pytest.raises(ferromla.Unsupported, match="backend is 'cutlass'"):
        _wrapper("cpu", backend="cutlass")
    buffers = _buffers("cpu") | {"kv_indices": None}
    with pytest.raises(ferromla.InvalidArgument, match="kv_indices is None"):
        _wrapper("cpu", **buffers)
