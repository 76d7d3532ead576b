"""The operations on indices, against loops in Python."""

from __future__ import annotations

import pytest
import torch

import ferromla
import problems_sparse

I32, I64 = torch.int32, torch.int64


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _table(b, columns, device, pages=1000):
    table = torch.randint(0, pages, (b, columns), generator=_generator(b), dtype=I32)
    table[:, columns // 2] = -1
    return table.to(device)


def _place(table, r, position, page_size):
    """The place of a position, by the definition."""
    column = position // page_size
    if position < 0 or column >= table.shape[1] or int(table[r, column]) < 0:
        return -1
    place = int(table[r, column]) * page_size + position % page_size
    return place if place < 2**31 else -1


@pytest.mark.parametrize("dtype", [I32, I64])
@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("rows", [(4,), (4, 3)])
def test_to_physical(device, rows, page_size, dtype):
    table = _table(4, 9, device)
    indices = torch.randint(-3, 11 * page_size, (*rows, 130), generator=_generator(), dtype=dtype)
    indices[..., 7], indices[..., 8] = problems_sparse.INT_MAX, problems_sparse.INT_MIN
    out = torch.full(indices.shape, -9, dtype=I32, device=device)
    assert ferromla.to_physical(indices.to(device), table, page_size, out=out) is out
    want = [[_place(table.cpu(), r, int(p), page_size) for p in indices[r].flatten()] for r in range(4)]
    assert out.cpu().flatten(1).tolist() == want
    again = ferromla.to_physical(indices.to(device), table, page_size)
    assert torch.equal(out, again)


def test_places_beyond_int32_are_absent(device):
    table = torch.tensor([[2**31 - 1, 2**24]], dtype=I32, device=device)
    indices = torch.tensor([[0, 63, 64, 127]], dtype=I64, device=device)
    assert ferromla.to_physical(indices, table, 64).tolist() == [[-1, -1, 2**30, 2**30 + 63]]


def test_strided_indices(device):
    indices = torch.arange(2 * 3 * 8, dtype=I64, device=device).view(8, 3, 2).transpose(0, 2)
    table = _table(2, 4, device)
    want = ferromla.to_physical(indices.contiguous(), table, 5)
    assert torch.equal(ferromla.to_physical(indices, table, 5), want)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (3, 0, 5), (3, 2, 0)])
def test_no_index(device, shape):
    out = ferromla.to_physical(torch.zeros(shape, dtype=I32, device=device), _table(shape[0], 4, device), 8)
    assert out.shape == shape


def _windows(lens, queries, table, page_size, window):
    """``(ids, offsets, first_pos)`` by the definition."""
    ids, offsets, first_pos = [], [0], []
    for r, (length, q_len) in enumerate(zip(lens, queries, strict=True)):
        length = min(max(length, 0), table.shape[1] * page_size)
        q_len = min(max(q_len, 0), length)
        first = max(0, length - q_len - window + 1)
        first = min(first, length)
        ids += [_place(table, r, position, page_size) for position in range(first, length)]
        offsets.append(len(ids))
        first_pos.append(first)
    return ids, offsets, first_pos


@pytest.mark.parametrize("window", [1, 5, 128])
@pytest.mark.parametrize("page_size", [1, 16, 61])
def test_window_token_ids(device, page_size, window):
    lens = [0, 1, 500, 200, 9 * page_size, 10**9, -4, 77]
    queries = [0, 1, 500, 3, 4, 100, 2, -1]
    table = _table(8, 9, device)
    want = _windows(lens, queries, table.cpu(), page_size, window)
    arrays = [torch.tensor(x, dtype=I32, device=device) for x in (lens, queries)]
    total = want[1][-1]
    got = ferromla.window_token_ids(*arrays, table, page_size=page_size, window=window, num_tokens=total + 3)
    want[0].extend([-1] * 3)
    for values, expected in zip(got, want, strict=True):
        assert values.tolist() == expected
    few = torch.full((7,), -9, dtype=I32, device=device)
    got = ferromla.window_token_ids(*arrays, table, page_size=page_size, window=window, out=few)
    assert got[0] is few
    assert few.tolist() == want[0][:7]
    assert got[1].tolist() == want[1]


def test_the_number_of_tokens_is_read_from_host_lengths():
    lens, queries = torch.tensor([40, 7], dtype=I32), torch.tensor([9, 7], dtype=I32)
    ids, offsets, _ = ferromla.window_token_ids(lens, queries, _table(2, 9, "cpu"), page_size=8, window=16)
    assert (ids.shape, offsets.tolist()) == ((31,), [0, 24, 31])
    none = torch.zeros(0, dtype=I32)
    ids, offsets, first = ferromla.window_token_ids(none, none, _table(1, 9, "cpu")[:0], page_size=8, window=16)
    assert (ids.tolist(), offsets.tolist(), first.tolist()) == ([], [0], [])


@pytest.mark.gpu
def test_the_number_of_tokens_of_device_lengths_must_be_given(cuda):
    lens = torch.tensor([40], dtype=I32, device=cuda)
    with pytest.raises(ferromla.InvalidArgument, match="num_tokens"):
        ferromla.window_token_ids(lens, lens, _table(1, 9, cuda), page_size=8, window=16)


def _combined(topk, positions, requests, ratio, window, bases, pad_to):
    """``(indices, lengths)`` by the definition."""
    compressed, window_base, first_pos = bases
    width = -(-(topk.shape[1] + window) // pad_to) * pad_to
    rows, lengths = [], []
    for t, (pos, r) in enumerate(zip(positions, requests, strict=True)):
        row = []
        if pos >= 0 and 0 <= r < len(first_pos):
            k = min((pos + 1) // ratio, topk.shape[1])
            row = [int(x) + compressed[r] if x >= 0 else -1 for x in topk[t, :k]]
            w = min(pos + 1, window)
            row += [window_base[r] + (pos - w + 1 - first_pos[r]) + j for j in range(w)]
        lengths.append(len(row))
        rows.append(row + [-1] * (width - len(row)))
    return rows, lengths


@pytest.mark.parametrize("pad_to", [1, 64, 128])
@pytest.mark.parametrize(("topk", "window", "ratio"), [(0, 1, 1), (5, 128, 4), (512, 128, 4), (100, 7, 128)])
@pytest.mark.parametrize("dtype", [I32, I64])
def test_combine_topk_window(device, topk, window, ratio, pad_to, dtype):
    generator = _generator(topk)
    tokens = 60
    chosen = torch.randint(-1, 3000, (tokens, topk), generator=generator, dtype=I32)
    positions = torch.randint(0, 4000, (tokens,), generator=generator).tolist()
    positions[:4] = [0, 1, window, -5]
    requests = torch.randint(0, 3, (tokens,), generator=generator).tolist()
    requests[4:6] = [-1, 3]
    bases = [0, 5000, 20_000], [100_000, 200_000, 300_000], [0, 0, 0]
    want = _combined(chosen, positions, requests, ratio, window, bases, pad_to)
    names = ("compressed_base", "window_base", "first_pos")
    given = {name: torch.tensor(base, dtype=dtype, device=device) for name, base in zip(names, bases, strict=True)}
    rows = [torch.tensor(x, dtype=dtype, device=device) for x in (positions, requests)]
    got = ferromla.combine_topk_window(chosen.to(device), *rows, ratio=ratio, window=window, pad_to=pad_to, **given)
    assert got[0].tolist() == want[0]
    assert got[1].tolist() == want[1]
    wide = torch.full((tokens, topk + window + 9), -9, dtype=I32, device=device)
    got = ferromla.combine_topk_window(chosen.to(device), *rows, ratio=ratio, window=window, out=wide, **given)
    assert got[0] is wide
    assert [row[:n] for row, n in zip(wide.tolist(), want[1], strict=True)] == [
        row[:n] for row, n in zip(want[0], want[1], strict=True)
    ]
    assert all(set(row[n:]) == {-1} for row, n in zip(wide.tolist(), want[1], strict=True))


def test_a_chunk_of_32768_tokens(device):
    """More than a small grid covers, from gathering the window to the lists."""
    t, window, page_size = 32_768, 128, 64
    lens = torch.tensor([t + 1000], dtype=I32, device=device)
    table = torch.randperm(600, generator=_generator())[None].to(device, I32)
    ids, offsets, first = ferromla.window_token_ids(
        lens, torch.tensor([t], dtype=I32, device=device), table, page_size=page_size, window=window, num_tokens=t + 127
    )
    position = torch.arange(1000 - 127, 1000 + t, device=device)
    assert torch.equal(ids.long(), table[0].long()[position // page_size] * page_size + position % page_size)
    none = torch.zeros(t, 0, dtype=I32, device=device)
    positions, requests = torch.arange(1000, 1000 + t, device=device), torch.zeros(t, dtype=I32, device=device)
    zero = torch.zeros(1, dtype=I32, device=device)
    lists, lengths = ferromla.combine_topk_window(
        none,
        positions,
        requests,
        ratio=4,
        window=window,
        compressed_base=zero,
        window_base=offsets[:1],
        first_pos=first,
    )
    assert bool((lengths == window).all())
    tokens = torch.arange(t, device=device)
    assert torch.equal(lists.long(), tokens[:, None] + torch.arange(window, device=device))


CASES = {
    "indices dtype": ("indices", lambda: ferromla.to_physical(torch.zeros(1, 2), _table(1, 4, "cpu"), 8)),
    "indices rank": ("indices", lambda: ferromla.to_physical(torch.zeros(2, dtype=I32), _table(2, 4, "cpu"), 8)),
    "page_size": ("page_size", lambda: ferromla.to_physical(torch.zeros(1, 2, dtype=I32), _table(1, 4, "cpu"), 0)),
    "table": ("block_table", lambda: ferromla.to_physical(torch.zeros(1, 2, dtype=I32), _table(2, 4, "cpu"), 8)),
    "window": ("window", lambda: _window_of(window=0)),
    "query_lens": ("query_lens", lambda: _window_of(query_lens=torch.zeros(3, dtype=I32))),
    "out": ("out", lambda: _window_of(out=torch.zeros(3, dtype=I64))),
    "ratio": ("ratio", lambda: _combine_of(ratio=0)),
    "pad_to": ("pad_to", lambda: _combine_of(pad_to=0)),
    "positions": ("positions", lambda: _combine_of(positions=torch.zeros(3, dtype=I32))),
    "base": ("window_base", lambda: _combine_of(window_base=torch.zeros(1))),
    "narrow": ("out", lambda: _combine_of(out=torch.zeros(2, 9, dtype=I32))),
}


def _window_of(**changes):
    lens = torch.zeros(2, dtype=I32)
    given = {"seq_lens": lens, "query_lens": lens, "block_table": _table(2, 4, "cpu"), "page_size": 8, "window": 4}
    return ferromla.window_token_ids(**given | changes)


def _combine_of(**changes):
    two, one = torch.zeros(2, dtype=I32), torch.zeros(1, dtype=I32)
    given = {"topk_indices": torch.zeros(2, 5, dtype=I32), "positions": two, "request_ids": two, "ratio": 4}
    given |= {"window": 5, "compressed_base": one, "window_base": one, "first_pos": one}
    return ferromla.combine_topk_window(**given | changes)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_refused_is_named(case):
    argument, call = case
    _window_of()
    _combine_of()
    with pytest.raises(ferromla.InvalidArgument) as error:
        call()
    assert error.value.argument == argument
