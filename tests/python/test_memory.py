"""Index values of any kind, guarded buffers, and caches past 2^31 elements."""

from __future__ import annotations

import pytest
import torch

import far_memory
import ferromla
import problems
import problems_sparse
import reference
import tolerance

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
BAD_PAGES = [-1, INT_MIN, INT_MAX, problems.UNUSED_PAGE, "one past"]


@pytest.mark.parametrize("bad", BAD_PAGES)
@pytest.mark.parametrize("page_size", [64, 16, 256])
def test_a_bad_page_id_anywhere_is_an_absent_page(device, bad, page_size):
    problem = problems.make(b=4, s_q=2, h=16, lens=[700, 600, 64, 1], page_size=page_size, device=device)
    bad = problem.cache.shape[0] if bad == "one past" else bad
    problem.table[0, 0] = bad
    problem.table[1, int(problem.lens[1] - 1) // page_size] = bad
    problem.table[2, :] = bad
    problem.table[0, problem.table.shape[1] // 2] = bad
    out, lse = problem.run()
    keys, present = reference.gather(problem.cache, problem.table, problem.lens)
    tolerance.check(out, lse, *reference.attention(problem.q, keys, present, problem.lens))


@pytest.mark.parametrize("length", [INT_MIN, -1, INT_MAX])
def test_any_length_is_clamped(device, length):
    problem = problems.make(b=3, h=16, lens=[200, 30, 64], device=device)
    problem.cache.nan_to_num_(0.5)
    problem.lens[1] = length
    out, lse = problem.run()
    capacity = problem.table.shape[1] * 64
    clamped = problem.lens.clamp(0, capacity)
    keys, present = reference.gather(problem.cache, problem.table, clamped)
    tolerance.check(out, lse, *reference.attention(problem.q, keys, present, clamped))


def test_random_tables_and_lengths_give_what_the_reference_gives(device):
    generator = torch.Generator().manual_seed(3)
    for _ in range(10):
        problem = problems.make(b=5, s_q=2, h=9, seq=400, device=device, page_size=32)
        problem.cache.nan_to_num_(0.5)
        shape = problem.table.shape
        problem.table = torch.randint(-4, problem.cache.shape[0] + 4, shape, generator=generator)
        problem.table = problem.table.int().to(device)
        problem.lens = torch.randint(-50, 700, (5,), generator=generator).int().to(device)
        out, lse = problem.run()
        clamped = problem.lens.clamp(0, shape[1] * 32)
        keys, present = reference.gather(problem.cache, problem.table, clamped)
        tolerance.check(out, lse, *reference.attention(problem.q, keys, present, clamped))


def _guarded(shape, dtype, device, guard, offset=0):
    """A contiguous tensor that begins ``offset`` bytes behind a multiple of 128, ``guard`` elements or a few more
    before and after it; gives ``(tensor, edges)``."""
    count = 1
    for dim in shape:
        count *= dim
    line = 128 // dtype.itemsize
    whole = torch.full((count + 2 * (guard + line),), _fill(dtype), dtype=dtype, device=device)
    begin = guard + (offset - whole[guard:].data_ptr()) % 128 // dtype.itemsize
    return whole[begin : begin + count].view(shape), [whole[:begin], whole[begin + count :]]


def _fill(dtype):
    return 0x5A if dtype == torch.uint8 else 12345.0


def _assert_untouched(edges, name):
    edges = torch.cat(edges)
    fill = torch.tensor(_fill(edges.dtype)).to(edges.dtype)
    assert bool((edges == fill).all()), f"{name}: bytes beside it were written"


@pytest.mark.parametrize(
    "options",
    [{}, {"num_splits": 2}, {"num_splits": 5}, {"batch_invariant": True}, {"causal": False}],
    ids=["auto", "halves", "splits", "invariant", "full"],
)
@pytest.mark.parametrize(("h", "s_q"), [(16, 1), (65, 3), (128, 2)])
@pytest.mark.parametrize("offset", [0, 16], ids=["lines", "within-a-line"])
def test_nothing_is_written_beside_workspace_and_outputs(device, options, h, s_q, offset):
    problem = problems.make(b=5, s_q=s_q, h=h, lens=[0, 3000, 129, 64, 5000], device=device)
    need = ferromla.workspace_bytes(
        batch=5,
        num_heads=h,
        q_len=s_q,
        page_size=64,
        max_seq_len=problem.table.shape[1] * 64,
        device=str(problem.q.device),
        **options,
    )
    guard = 4096
    workspace, beside_workspace = _guarded((need,), torch.uint8, device, guard, offset)
    out, beside_out = _guarded((5, s_q, h, 512), problem.q.dtype, device, guard)
    lse, beside_lse = _guarded((5, s_q, h), torch.float32, device, guard)
    problem.check(out=out, lse=lse, workspace=workspace, **options)
    for edges, name in ((beside_workspace, "workspace"), (beside_out, "out"), (beside_lse, "lse")):
        _assert_untouched(edges, name)


def test_a_workspace_one_byte_short_is_refused(device):
    problem = problems.make(b=3, h=16, lens=[500, 64, 3], device=device)
    need = ferromla.workspace_bytes(
        batch=3,
        num_heads=16,
        page_size=64,
        max_seq_len=problem.table.shape[1] * 64,
        device=str(problem.q.device),
    )
    with pytest.raises(ferromla.InvalidArgument, match=rf"workspace.*{need}"):
        problem.run(workspace=torch.empty(need - 1, dtype=torch.uint8, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [64, 61])
def test_caches_past_2_31_elements(cuda, page_size):
    """Pages at the far end of a cache of more than 2^31 elements are read and written there."""
    pages = 2**31 // (page_size * 576) + 3000
    cache = torch.full((pages, page_size, 576), problems.NAN, dtype=torch.bfloat16, device=cuda)
    assert cache.numel() > 2**31
    lens = torch.tensor([900, 333], dtype=torch.int32, device=cuda)
    columns = -(-900 // page_size)
    table = torch.arange(pages - 2 * columns, pages, dtype=torch.int32, device=cuda).flip(0).view(2, columns)
    q = problems.random_queries(2, 1, 16, 576, device=cuda).bfloat16()
    rows = problems.random_keys(1233, 576, device=cuda).bfloat16()
    position = torch.cat([torch.arange(900), torch.arange(333)]).to(cuda)
    request = torch.tensor([0] * 900 + [1] * 333, device=cuda)
    slots = table[request, position // page_size].long() * page_size + position % page_size
    assert int(slots.min()) * 576 > 2**31
    ferromla.append_kv(rows[:, :512], rows[:, 512:], cache, slots)
    out, lse = problems.poisoned_outputs(q)
    ferromla.decode(q, cache, table, lens, out=out, lse=lse)
    keys, present = reference.gather(cache, table, lens)
    assert torch.equal(keys[0, :900, 0], rows[:900])
    tolerance.check(out, lse, *reference.attention(q, keys, present, lens))
    gathered, _ = ferromla.gather_kv(cache, table, lens, num_tokens=1233)
    assert torch.equal(gathered, rows)


def _far(keys, d_qk, device):
    """The same lists over the last pages of a cache of more than 4 GiB, all NaN but for those."""
    pages, page_size, width = keys.cache.shape
    token = width * keys.cache.dtype.itemsize
    count = (2**32 + 2**30) // (page_size * token) + pages
    cache = ferromla.empty_kv_cache(
        num_pages=count, page_size=page_size, kv_format=keys.kv_format, d_qk=d_qk, device=device
    )
    cache.view(torch.uint8).fill_(0xFF)
    cache[-pages:] = keys.cache
    first = (count - pages) * page_size
    here = (keys.indices >= 0) & (keys.indices < pages * page_size)
    indices = torch.where(here, keys.indices + first, -1)
    return cache, indices


@pytest.mark.gpu
@pytest.mark.parametrize("h", [16, 64, 128])
@pytest.mark.parametrize(
    ("main", "extra"),
    [("fp8_v32", "bf16"), ("fp8_v4", "fp8_v4"), ("fp8_v41_split", "fp4_v41"), ("bf16", "bf16"), ("fp8", "fp8")],
)
def test_lists_over_caches_past_4_gib(cuda, main, extra, h):
    d_qk = 576 if main in ("fp8_v32", "bf16", "fp8") else 512
    problem = problems_sparse.decode(h=h, topk=130, page=64, extra=(90, 70, 64), d_qk=d_qk, device=cuda)
    problem.main, problem.extra = problem.main.quantised(main), problem.extra.quantised(extra)
    want = problem.check()
    for keys in (problem.main, problem.extra):
        keys.cache, keys.indices = _far(keys, d_qk, cuda)
    got = problem.run()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


REACH = 2**36 + 2**32


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kv_format", "page_size", "h"), [("fp8", 64, 16), ("fp8_v32", 64, 32), ("fp8_v32", 61, 128), ("fp8", 1, 64)]
)
def test_quantised_pages_over_more_than_64_gib(cuda, kv_format, page_size, h):
    """As those of one layer are where the layers of a page lie together."""
    problem = problems.make(b=2, h=h, lens=[300, 133], page_size=page_size, device=cuda)
    near = ferromla.quantize_kv(problem.cache.nan_to_num(0.0), kv_format).view(torch.uint8)
    with far_memory.apart(near, REACH) as far:
        calls = [(problem.q, cache, problem.table, problem.lens) for cache in (near, far)]
        want, got = (ferromla.decode(*call, kv_format=kv_format) for call in calls)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("h", [16, 64, 128])
def test_lists_over_more_than_64_gib(cuda, h):
    problem = problems_sparse.decode(h=h, topk=130, page=64, extra=(90, 70, 64), d_qk=576, device=cuda)
    problem.main, problem.extra = problem.main.quantised("fp8_v32"), problem.extra.quantised("fp8")
    want = problem.check()
    with far_memory.apart(problem.main.cache.view(torch.uint8), REACH) as problem.main.cache:
        got = problem.run()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["fp8", "fp8_v32"])
def test_quantised_pages_past_4_gib(cuda, kv_format):
    problem = problems.make(b=2, h=64, lens=[900, 333], device=cuda)
    near = ferromla.quantize_kv(problem.cache.nan_to_num(0.0), kv_format)
    count = (2**32 + 2**30) // near[0].nbytes + near.shape[0]
    far = torch.full((count, *near.shape[1:]), 0xFF, dtype=torch.uint8, device=cuda)
    far[-near.shape[0] :] = near.view(torch.uint8)
    table = torch.where(problem.table < near.shape[0], problem.table + (count - near.shape[0]), -1)
    lens = problem.lens
    want = ferromla.decode(problem.q, near.view(torch.uint8), problem.table, lens, kv_format=kv_format)
    got = ferromla.decode(problem.q, far, table.int(), lens, kv_format=kv_format)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
