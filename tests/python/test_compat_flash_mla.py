"""FlashMLA's interface: its shapes, its defaults and what it gives rows without keys, against float64."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys

import pytest
import torch

import ferromla
import graphs
import problems
import problems_sparse
import tolerance
from ferromla.compat import flash_mla

INF = float("inf")
# Of the cache and of the extra one.
FORMATS = (("fp8_v32", "fp8_v32"), ("fp8_v4", "fp8_v4"), ("fp8_v41", "fp8_v41"), ("fp8_v41", "fp4_v41"))


def _check(out, lse, want_out, want_lse):
    """``lse`` is FlashMLA's: ``[b, heads, s_q]``, +inf for rows without keys."""
    assert lse.shape == want_lse.transpose(1, 2).shape
    assert not bool(torch.isneginf(lse).any())
    tolerance.check(out, lse.transpose(1, 2).masked_fill(torch.isposinf(lse).transpose(1, 2), -INF), want_out, want_lse)


def _dense(problem, metadata=None, **options):
    metadata = flash_mla.get_mla_metadata()[0] if metadata is None else metadata
    cache = problem.cache if problem.cache.ndim == 4 else problem.cache.unsqueeze(2)
    return flash_mla.flash_mla_with_kvcache(problem.q, cache, problem.table, problem.lens, 512, metadata, **options)


@pytest.mark.parametrize(("h", "s_q", "causal"), [(16, 1, False), (128, 2, True), (64, 3, False), (5, 4, True)])
def test_dense(device, h, s_q, causal):
    problem = problems.make(h=h, s_q=s_q, lens=[200, 0, 1, 65], device=device)
    out, lse = _dense(problem, causal=causal)
    _check(out, lse, *problem.expected(causal=causal))
    assert bool(torch.isposinf(lse[1]).all())
    assert bool((out[1] == 0).all())


def test_dense_is_not_causal_by_default(device):
    problem = problems.make(h=16, s_q=3, lens=[70, 3], device=device)
    _check(*_dense(problem, softmax_scale=0.1), *problem.expected(causal=False, softmax_scale=0.1))


@pytest.mark.parametrize("kv_format", ["fp8", "fp8_v32"])
def test_dense_over_codes(device, kv_format):
    problem = problems.make(h=16, s_q=2, lens=[200, 0, 65], device=device).quantised(kv_format)
    _check(*_dense(problem, causal=True, is_fp8_kvcache=True), *problem.expected(causal=True))


def test_one_schedule_serves_all_layers(device):
    metadata, num_splits = flash_mla.get_mla_metadata("whatever", earlier="versions took")
    assert num_splits is None
    first, second = (problems.make(h=16, lens=[300, 20], device=device, seed=seed) for seed in (1, 2))
    _check(*_dense(first, metadata), *first.expected(causal=False))
    plan = metadata.plan
    _check(*_dense(second, metadata, num_splits=num_splits), *second.expected(causal=False))
    assert metadata.plan is plan


def _sparse(problem, metadata=None, **options):
    metadata = flash_mla.get_mla_metadata()[0] if metadata is None else metadata
    main, extra = problem.main, problem.extra
    if extra is not None:
        options |= {"extra_k_cache": extra.cache.unsqueeze(2), "extra_indices_in_kvcache": extra.indices}
        options |= {"extra_topk_length": extra.lens}
    options |= {"is_fp8_kvcache": main.kv_format is not None, "indices": main.indices, "topk_length": main.lens}
    return flash_mla.flash_mla_with_kvcache(problem.q, main.cache.unsqueeze(2), None, None, 512, metadata, **options)


@pytest.mark.parametrize(("h", "extra"), list(itertools.product([16, 64], [None, (300, 70, 64)])))
def test_sparse(device, h, extra):
    sink = torch.linspace(-2, 2, h, device=device)
    problem = problems_sparse.decode(h=h, extra=extra, lens="b", device=device)
    for keys in (problem.main, problem.extra):
        if keys is not None:
            keys.lens[1] = 0
    out, lse = _sparse(problem, attn_sink=sink)
    _check(out, lse, *problem.expected(attn_sink=sink))
    assert bool(torch.isposinf(lse[1]).all())


@pytest.mark.parametrize(("kv_format", "extra_format"), FORMATS)
def test_sparse_over_codes(device, kv_format, extra_format):
    d_qk = 576 if kv_format == "fp8_v32" else 512
    problem = problems_sparse.decode(h=64, extra=(300, 70, 64), d_qk=d_qk, device=device)
    problem.main, problem.extra = problem.main.quantised(kv_format), problem.extra.quantised(extra_format)
    _check(*_sparse(problem), *problem.expected())


def _sparse_fwd(problem, **options):
    kv = problem.keys.cache.flatten(0, 1).unsqueeze(1)
    indices = problem.keys.indices.unsqueeze(1)
    return flash_mla.flash_mla_sparse_fwd(problem.q, kv, indices, 0.05, topk_length=problem.keys.lens, **options)


def _prefill_problem(device, d_qk=576):
    """Lists of which every third has no entry that counts."""
    problem = problems_sparse.prefill(d_qk=d_qk, lens="row", device=device)
    problem.keys.lens[::3] = 0
    return problem


@pytest.mark.parametrize("d_qk", [576, 512])
def test_sparse_prefill(device, d_qk):
    sink = torch.linspace(-2, 2, 16, device=device)
    problem = _prefill_problem(device, d_qk)
    out, max_logits, lse = _sparse_fwd(problem, attn_sink=sink)
    want = problem.expected(attn_sink=sink, softmax_scale=0.05)
    lonely = torch.isneginf(want[2])
    assert bool(lonely.any())
    assert torch.equal(torch.isposinf(lse), lonely)
    found = tolerance.prefill_faults(out, max_logits, lse.masked_fill(lonely, -INF), *want)
    assert not found, "\n".join(found)


def test_sparse_prefill_with_the_lse_of_the_first_entries(device):
    problem = _prefill_problem(device)
    *results, of_first = _sparse_fwd(problem, indexer_topk=64)
    for result, without in zip(results, _sparse_fwd(problem), strict=True):
        assert torch.equal(result, without)
    problem.keys.indices, problem.keys.lens = problem.keys.indices[:, :64], problem.keys.lens.clamp(max=64)
    want = problem.expected(softmax_scale=0.05)
    lonely = torch.isneginf(want[2])
    assert torch.equal(torch.isposinf(of_first), lonely)
    same = want[0].float(), want[1].float()
    found = tolerance.prefill_faults(*same, of_first.masked_fill(lonely, -INF), *want)
    assert not found, "\n".join(found)


@pytest.mark.gpu
def test_a_graph_keeps_the_schedule_that_was_captured(cuda):
    """Who captures a step drops its metadata; each replay makes the schedule anew, for the lengths of the moment."""
    problem = problems.make(h=16, s_q=1, lens=[3000, 10, 700, 64], device=cuda)
    other = problems.make(h=16, s_q=1, lens=[5, 2000, 0, 900], device=cuda, seed=5)
    q, cache, table, lens = (torch.zeros_like(x) for x in (problem.q, problem.cache, problem.table, problem.lens))
    cache = cache.new_zeros(max(len(problem.cache), len(other.cache)), *cache.shape[1:])
    table = table.new_zeros(4, max(problem.table.shape[1], other.table.shape[1]))
    results = []

    def step():
        metadata, _ = flash_mla.get_mla_metadata()
        results[:] = [
            flash_mla.flash_mla_with_kvcache(q, cache.unsqueeze(2), table, lens, 512, metadata) for _ in range(2)
        ]

    graph = graphs.captured(step)
    gc.collect()
    scribble = [torch.full((1 << 20,), problems.NAN, device=cuda) for _ in range(64)]
    for now in (problem, other, problem):
        table.zero_()
        q.copy_(now.q), cache[: len(now.cache)].copy_(now.cache), lens.copy_(now.lens)
        table[:, : now.table.shape[1]].copy_(now.table)
        graph.replay()
        for out, lse in results:
            _check(out, lse, *now.expected(causal=False))
    del scribble


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"num_splits": torch.zeros(3)}, ferromla.InvalidArgument, "num_splits is of type Tensor"),
        ({"head_dim_v": 256}, ferromla.Unsupported, "head_dim_v is 256: must be 512"),
        ({"tile_scheduler_metadata": None}, ferromla.InvalidArgument, "tile_scheduler_metadata is of type NoneType"),
        (
            {"q": torch.zeros(3, 16, 576).bfloat16()},
            ferromla.InvalidArgument,
            r"q is of shape \[3, 16, 576\]: must have 4",
        ),
        ({"indices": torch.zeros(3, 8).int()}, ferromla.InvalidArgument, r"indices is of shape \[3, 8\]: must have 3"),
        ({"block_table": None}, ferromla.InvalidArgument, "block_table is None"),
        ({"cache_seqlens": None}, ferromla.InvalidArgument, "cache_seqlens is None"),
        ({"topk_length": torch.zeros(3).int()}, ferromla.InvalidArgument, "topk_length is of type Tensor"),
        ({"extra_k_cache": torch.zeros(3)}, ferromla.InvalidArgument, "extra_k_cache is of type Tensor"),
        ({"indices": torch.zeros(3, 1, 8).int(), "causal": True}, ferromla.InvalidArgument, "causal is True"),
        ({"k_cache": torch.zeros(4, 64, 1, 600).byte(), "is_fp8_kvcache": True}, ferromla.Unsupported, "600 wide"),
    ],
)
def test_bad_arguments_are_refused_by_name(options, kind, match):
    problem = problems.make(h=16, lens=[100, 0, 70])
    given = {
        "q": problem.q,
        "k_cache": problem.cache.unsqueeze(2),
        "block_table": problem.table,
        "cache_seqlens": problem.lens,
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
    }
    with pytest.raises(kind, match=match):
        flash_mla.flash_mla_with_kvcache(**given | options)


def test_metadata_of_other_shapes_is_refused():
    metadata, _ = flash_mla.get_mla_metadata()
    _dense(problems.make(h=16, lens=[100, 0, 70]), metadata)
    with pytest.raises(ferromla.InvalidArgument, match="plan"):
        _dense(problems.make(h=32, lens=[100, 0, 70]), metadata)


def test_a_call_that_is_refused_leaves_the_metadata_without_a_schedule():
    metadata, _ = flash_mla.get_mla_metadata()
    problem = problems.make(h=16, lens=[100, 0, 70])
    lists = problems_sparse.decode()
    with pytest.raises(ferromla.InvalidArgument, match="softmax_scale"):
        _dense(problem, metadata, softmax_scale=-1.0)
    with pytest.raises(ferromla.InvalidArgument, match="softmax_scale"):
        _sparse(lists, metadata, softmax_scale=-1.0)
    assert metadata.plan is None
    _check(*_sparse(lists, metadata), *lists.expected())


@pytest.mark.parametrize("indexer_topk", [-1, 129])
def test_more_entries_than_a_list_has_are_refused(indexer_topk):
    with pytest.raises(ferromla.InvalidArgument, match=f"indexer_topk is {indexer_topk}"):
        _sparse_fwd(problems_sparse.prefill(), indexer_topk=indexer_topk)


def test_what_flash_mla_lacks_on_hopper_says_so():
    with pytest.raises(ferromla.Unsupported, match="sm_100"):
        flash_mla.flash_attn_varlen_func(1, 2, causal=True)


def test_arguments_by_position_are_where_flash_mla_has_them(device):
    metadata, num_splits = flash_mla.get_mla_metadata()
    problem = problems.make(h=16, s_q=2, lens=[100, 0, 70], device=device)
    inputs = problem.q, problem.cache.unsqueeze(2), problem.table, problem.lens, 512
    out, lse = flash_mla.flash_mla_with_kvcache(*inputs, metadata, num_splits, 0.1, True, False)
    _check(out, lse, *problem.expected(softmax_scale=0.1, causal=True))
    sink = torch.linspace(-2, 2, 16, device=device)
    problem = problems_sparse.decode(extra=(300, 70, 64), lens="b", device=device)
    keys, extra = problem.main, problem.extra
    lists = keys.indices, sink, extra.cache.unsqueeze(2), extra.indices, keys.lens, extra.lens
    metadata, num_splits = flash_mla.get_mla_metadata()
    inputs = problem.q, keys.cache.unsqueeze(2), None, None, 512
    out, lse = flash_mla.flash_mla_with_kvcache(*inputs, metadata, num_splits, 0.1, False, False, *lists)
    _check(out, lse, *problem.expected(attn_sink=sink, softmax_scale=0.1))


def test_a_program_that_imports_flash_mla_gets_this_one():
    """In a process of its own: what is installed stays."""
    program = (
        "import ferromla.compat.flash_mla as ours; ours.install()\n"
        "import flash_mla, flash_mla.flash_mla_interface as interface\n"
        "from flash_mla.flash_mla_interface import FlashMLASchedMeta\n"
        "from flash_mla import get_mla_metadata\n"
        "assert flash_mla is interface is ours and isinstance(get_mla_metadata()[0], FlashMLASchedMeta)\n"
        "ours.install('email.attention')\n"
        "from email.attention.flash_mla_interface import get_mla_metadata as of_another\n"
        "assert of_another is get_mla_metadata\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
