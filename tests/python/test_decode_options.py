"""Each option of decode, and numbers at the edge, on both backends."""

from __future__ import annotations

import pytest
import torch

import ferromla
import problems
import reference
import tolerance

INF = float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_of_512(device, dtype, causal):
    problems.make(b=5, s_q=2, h=16, d_qk=512, seq=300, dtype=dtype, device=device, causal=causal).check()


@pytest.mark.parametrize("page_size", [2, 3, 128, 1000])
def test_other_page_sizes(device, page_size):
    problems.make(b=4, h=16, seq=700, page_size=page_size, device=device).check()


@pytest.mark.parametrize(("h", "s_q"), [(2, 7), (256, 1), (200, 3), (128, 9), (1, 300), (16, 33)])
def test_many_rows(device, h, s_q):
    problems.make(b=2, s_q=s_q, h=h, seq=333, device=device).check()


@pytest.mark.parametrize(("h", "h_kv"), [(8, 8), (20, 5), (64, 4)])
def test_many_cached_heads(device, h, h_kv):
    problems.make(b=3, s_q=2, h=h, h_kv=h_kv, seq=150, device=device).check()


@pytest.mark.parametrize("lens", [[1600, 64, 900], [64, 1300, 0, 700]], ids=["short", "empty"])
@pytest.mark.parametrize("requests", [13, 26, 52])
@pytest.mark.parametrize(("h", "s_q"), [(16, 1), (32, 1), (16, 2)])
def test_lengths_that_do_not_share_out(device, h, s_q, requests, lens):
    """Few rows: a cluster that shares an item's tiles has the end of one request and the beginning of another."""
    problems.make(lens=(lens * requests)[:requests], h=h, s_q=s_q, device=device).check()


def _two_parts(problem):
    """The same problem, with q and cache as separate allocations per part."""
    problem.q, q = (problem.q[..., :512].contiguous(), problem.q[..., 512:].contiguous()), problem.q
    problem.cache = (problem.cache[..., :512].contiguous(), problem.cache[..., 512:].contiguous())
    return problem, q


@pytest.mark.parametrize("h_kv", [1, 2])
@pytest.mark.parametrize("page_size", [64, 61])
def test_two_part_inputs(device, h_kv, page_size):
    problem = problems.make(b=4, s_q=2, h=16, h_kv=h_kv, seq=300, page_size=page_size, device=device)
    one = problem.check()
    two, q = _two_parts(problem)
    out, lse = problems.poisoned_outputs(q)
    ferromla.decode(two.q, two.cache, two.table, two.lens, out=out, lse=lse)
    assert torch.equal(out, one[0])
    assert torch.equal(lse, one[1])


def test_two_part_cache_under_a_whole_q(device):
    problem = problems.make(b=2, h=16, seq=100, device=device)
    want = problem.run()
    problem.cache = [problem.cache[..., :512].contiguous(), problem.cache[..., 512:].contiguous()]
    assert torch.equal(problem.run()[0], want[0])


def _strided(tensor, *, pad, dim):
    """The same values in an allocation with ``pad`` extra NaN entries along ``dim``."""
    shape = list(tensor.shape)
    shape[dim] += pad
    fill = problems.NAN if tensor.is_floating_point() else problems.UNUSED_PAGE
    wide = torch.full(shape, fill, dtype=tensor.dtype, device=tensor.device)
    view = wide.narrow(dim, pad // 2, tensor.shape[dim])
    view.copy_(tensor)
    assert not view.is_contiguous() or tensor.shape[dim] == shape[dim]
    return view


@pytest.mark.parametrize("which", ["q_row", "q_head", "cache_row", "cache_page", "table", "lens"])
def test_strided_inputs(device, which):
    problem = problems.make(b=4, s_q=2, h=16, seq=200, page_size=32, device=device)
    if which == "q_row":
        problem.q = _strided(problem.q, pad=64, dim=3)
    elif which == "q_head":
        problem.q = _strided(problem.q, pad=6, dim=2)
    elif which == "cache_row":
        problem.cache = _strided(problem.cache, pad=64, dim=2)
    elif which == "cache_page":
        problem.cache = _strided(problem.cache, pad=10, dim=1)
    elif which == "table":
        problem.table = _strided(problem.table, pad=3, dim=1)
    else:
        problem.lens = torch.stack([problem.lens, torch.full_like(problem.lens, -7)], 1)[:, 0]
    problem.check()


def test_transposed_q_and_outputs(device):
    problem = problems.make(b=3, s_q=4, h=16, seq=100, device=device)
    problem.q = problem.q.transpose(1, 2).contiguous().transpose(1, 2)
    shape = (16, 4, 3)
    out = torch.full((*shape, 512), problems.NAN, dtype=problem.q.dtype, device=device).transpose(0, 2)
    lse = torch.full(shape, problems.NAN, device=device).transpose(0, 2)
    assert problem.q.stride() != out.stride()
    problem.check(out=out, lse=lse)


def test_outputs_within_larger_tensors_leave_the_rest_alone(device):
    problem = problems.make(b=3, s_q=2, h=16, seq=100, device=device)
    out = torch.full((3, 2, 20, 576), 7.0, dtype=problem.q.dtype, device=device)
    lse = torch.full((3, 2, 20), 7.0, device=device)
    problem.check(out=out[:, :, 2:18, :512], lse=lse[:, :, 2:18])
    out[:, :, 2:18, :512] = 7.0
    lse[:, :, 2:18] = 7.0
    assert bool((out == 7).all())
    assert bool((lse == 7).all())


def test_a_scale_of_ones_own(device):
    problems.make(b=2, h=16, seq=100, device=device, softmax_scale=0.01).check()


@pytest.mark.parametrize("num_splits", [None, 3])
def test_attention_sink(device, num_splits):
    sink = torch.randn(16, generator=torch.Generator().manual_seed(1)) * 5
    sink[:3] = torch.tensor([INF, -INF, 0.0])
    problem = problems.make(b=4, s_q=2, h=16, seq=300, device=device)
    out, _ = problem.check(attn_sink=sink.to(device), num_splits=num_splits)
    plain, _ = problem.check(num_splits=num_splits)
    assert bool((out[:, :, 0] == 0).all())
    assert torch.equal(out[:, :, 1], plain[:, :, 1])


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 1000, 2**40])
def test_any_number_of_splits(device, num_splits):
    lens = [0, 1, 63, 64, 65, 900, 2000]
    problems.make(h=16, s_q=2, lens=lens, device=device).check(num_splits=num_splits)


def test_one_long_request_is_split_by_the_scheduler(device):
    problems.make(b=1, h=16, lens=[20_000], device=device).check()


def test_zero_requests_tokens_and_lengths(device):
    empty = problems.make(b=0, h=16, lens=[], device=device)
    out, lse = empty.check()
    assert out.shape == (0, 1, 16, 512)
    out, lse = problems.make(b=2, s_q=0, h=16, lens=[5, 9], device=device).check()
    assert out.shape == (2, 0, 16, 512)
    out, lse = problems.make(b=3, s_q=2, h=16, lens=[0, 0, 0], device=device).check()
    assert bool((out == 0).all())
    assert bool(torch.isneginf(lse).all())
    # A cache and a table without any page.
    problem = problems.make(b=2, h=16, lens=[0, 0], device=device)
    problem.cache, problem.table = problem.cache[:0], problem.table[:, :0]
    problem.lens = torch.full_like(problem.lens, 5)
    out, lse = problem.run()
    assert bool((out == 0).all())
    assert bool(torch.isneginf(lse).all())


@pytest.mark.parametrize("magnitude", [1e2, 1e4])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_large_scores_stay_finite(device, magnitude, num_splits):
    problem = problems.make(b=3, s_q=2, h=16, seq=300, device=device, dtype=torch.bfloat16)
    problem.options["softmax_scale"] = magnitude / 24
    problem.check(num_splits=num_splits)


@pytest.mark.parametrize("page_size", [64, 61], ids=["pages", "tokens"])
@pytest.mark.parametrize("h", [7, 16, 40])
@pytest.mark.parametrize(
    "lens", [[40], [330], [860], [860, 1, 0, 500], [130] * 5 + [1] * 2], ids=lambda lens: f"{len(lens)} of {lens[0]}"
)
def test_few_short_requests(device, lens, h, page_size):
    """On CUDA clusters as large as requests have tiles, the two columns that the table has more included."""
    problem = problems.make(b=len(lens), h=h, lens=lens, page_size=page_size, device=device)
    problem.check()
    problem.quantised("fp8").check()


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_equal_scores(device, value):
    problem = problems.make(b=2, h=16, lens=[1, 777], device=device)
    problem.q.fill_(value)
    for row in range(2):
        problem.keys[row] = problem.keys[row, :1]
    problem.cache, problem.table = problems.page(problem.keys, problem.lens, 64, torch.Generator().manual_seed(5))
    out, _ = problem.check()
    torch.testing.assert_close(out[:, 0, 0], problem.keys[:, 0, 0, :512], rtol=8e-3, atol=1e-6)


def test_fp16_at_the_edge_of_its_range(device):
    problem = problems.make(b=2, s_q=2, h=16, lens=[65, 300], dtype=torch.float16, device=device)
    problem.keys.copy_(torch.where(problem.keys > 0, 60000.0, -60000.0))
    problem.q.mul_(1e-3)
    problem.cache, problem.table = problems.page(problem.keys, problem.lens, 64, torch.Generator().manual_seed(5))
    problem.check()
    problem.keys.fill_(65504.0)
    problem.cache, problem.table = problems.page(problem.keys, problem.lens, 64, torch.Generator().manual_seed(5))
    out, _ = problem.check()
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("poison", [problems.NAN, INF])
def test_a_masked_token_does_not_reach_the_rows_before_it(device, poison):
    """The last token is seen by the last query only: the others stay clean, the last does not."""
    problem = problems.make(b=2, s_q=3, h=16, lens=[130, 64], device=device)
    problem.keys[0, 129] = poison
    problem.keys[1, 63] = poison
    problem.cache, problem.table = problems.page(problem.keys, problem.lens, 64, torch.Generator().manual_seed(2))
    out, lse = problem.run()
    problem.keys[0, 129] = 0
    problem.keys[1, 63] = 0
    want_out, want_lse = problem.expected()
    tolerance.check(out[:, :2], lse[:, :2], want_out[:, :2], want_lse[:, :2])
    assert bool(torch.isnan(out[:, 2]).any())


def test_the_same_call_gives_the_same_bits(device):
    problem = problems.make(b=6, s_q=2, h=64, seq=1500, device=device)
    first = [x.clone() for x in problem.run()]
    for _ in range(5):
        out, lse = problem.run()
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])


@pytest.mark.parametrize(
    ("kv_format", "num_splits"), [("bf16", None), ("bf16", 3), ("bf16", 40), ("fp8", None), ("fp8", 7)]
)
@pytest.mark.parametrize(("h", "s_q"), [(16, 1), (16, 2), (64, 1), (128, 2)])
def test_batch_invariance(device, h, s_q, kv_format, num_splits):
    """Bit for bit the same under permutation, removal and addition of other requests."""
    lens = [1, 700, 64, 0, 2500, 5000, 129]
    options = {"batch_invariant": True, "num_splits": num_splits}
    problem = problems.make(h=h, s_q=s_q, lens=lens, device=device, **options)
    problem = problem if kv_format == "bf16" else problem.quantised(kv_format)
    out, lse = problem.check()
    for order in ([6, 5, 4, 3, 2, 1, 0], [4], [5, 1], [1, 5, 1, 1, 4, 6, 6, 0, 3, 2, 2] * 4):
        got_out, got_lse = problem.of(order).run()
        assert torch.equal(got_out, out[order])
        assert torch.equal(got_lse, lse[order])


def test_lengths_past_the_table_are_clamped(device):
    problem = problems.make(b=3, h=16, lens=[128, 64, 10], device=device)
    problem.table = problem.table[:, :2].contiguous()
    problem.lens = torch.tensor([10_000, 64, -5], dtype=torch.int32, device=device)
    out, lse = problem.run()
    keys, present = reference.gather(problem.cache, problem.table, problem.lens)
    tolerance.check(out, lse, *reference.attention(problem.q, keys, present, problem.lens.clamp(0, 128)))
    assert bool(torch.isneginf(lse[2]).all())


def test_outputs_are_made_when_not_given(device):
    problem = problems.make(b=3, s_q=2, h=16, device=device)
    out, lse = ferromla.decode(problem.q, problem.cache, problem.table, problem.lens)
    assert (out.dtype, out.device, lse.dtype) == (problem.q.dtype, problem.q.device, torch.float32)
    assert lse.shape == problem.q.shape[:-1]
    tolerance.check(out, lse, *problem.expected())
