"""Scales that differ widely within a request: dense attention over fp8_v32, sparse attention over all formats with
scales, queries of any size."""

from __future__ import annotations

import pytest
import torch

import problems
import problems_formats
import problems_sparse
import problems_wide
import reference_formats as formats
import tolerance
from problems_wide import Spread

FORMS = {form.name: form for form in formats.FORMATS if form.scale is not None}
V32 = FORMS["fp8_v32"]
LENS = [200, 130, 300, 65]
each_number_of_heads = pytest.mark.parametrize("h", [16, 32, 64, 128])
each_query_size = pytest.mark.parametrize("power", [-20, 0, 12])
each_rope_size = pytest.mark.parametrize("rope", [-10, 0, 10])


def _v32(rope):
    return Spread((-15, 10), 12, rope)


def _sizes(spread, drawn):
    """``[b, s]``: sizes of the tokens of four requests, at random, rising, falling, and small ones only."""
    longest, (least, most) = max(LENS), spread.tokens
    mixed = torch.randint(least, most + 1, (longest,), **drawn)
    small = torch.randint(least, least + 3, (longest,), **drawn)
    rising = torch.linspace(least, most, longest, device=mixed.device).round().long()
    return torch.stack([mixed, rising, rising.flip(0), small])


@each_number_of_heads
@each_query_size
@each_rope_size
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("q_lens", [None, [1, 5, 0, 3]], ids=["decode", "prefill"])
def test_dense_attention(device, q_lens, dtype, rope, power, h):
    drawn = problems.drawing(h, device)
    sizes = _sizes(_v32(rope), drawn)
    tokens = problems_wide.tokens(V32, sizes.flatten(), _v32(rope), drawn)
    lens = torch.tensor(LENS, dtype=torch.int32, device=device)
    cache, table = problems_formats.page(tokens, V32, sizes.shape[1], lens, page_size=61 if h == 32 else 64)
    numbers = formats.dequantise(tokens, V32).view(*sizes.shape, -1)
    seen = torch.arange(sizes.shape[1], device=device) < lens[:, None]
    request = torch.repeat_interleave(torch.tensor(q_lens or [1] * len(LENS))).to(device)
    keys, seen = numbers[request], seen[request]
    q, scale = problems_wide.queries(h, keys, seen, dtype, power, drawn)
    options = {"kv_format": "fp8_v32", "causal": False, "softmax_scale": scale}
    indptr = None if q_lens is None else problems.offsets(q_lens).to(device)
    shaped = q.unsqueeze(1) if q_lens is None else q
    problem = problems.Problem(shaped, cache, table, lens, None, None, options, indptr)
    for num_splits in (None, 3):
        out, lse = problem.run(num_splits=num_splits)
        problems_wide.check(out.view(-1, h, 512), lse.view(-1, h), q, keys, seen, scale)


def _lists(form, spread, device, drawn, topk=190, page=16):
    """Lists of six query tokens: at random, rising, falling, only small tokens, only large ones, and one large token
    behind many small ones. All tokens that nobody lists are NaN."""
    t = 30 * page
    sizes = torch.randint(spread.tokens[0], spread.tokens[1] + 1, (t,), **drawn)
    tokens = problems_wide.tokens(form, sizes, spread, drawn)
    by_size = sizes.argsort()
    at = torch.randint(t, (6, topk), **drawn)
    at[1] = torch.linspace(0, t - 1, topk, device=device).long()
    at[2] = at[1].flip(0)
    at[3] //= 10
    at[4] = t - 1 - at[4] // 10
    at[5] //= 10
    at[5, -5] = t - 1
    indices = by_size[at].int()
    indices[:, 7::40] = -1
    numbers = formats.dequantise(tokens, form)
    keys = problems_sparse.Keys(numbers.view(30, page, -1), indices.view(3, 2, topk), None, form.name)
    unlisted = ~keys.lists().used()
    for part in (tokens.codes, tokens.scales, tokens.rope):
        part[unlisted] = 0xFF
    tokens.codes[unlisted, ::2] = 0x7F
    keys.numbers, keys.cache = keys.cache, problems_formats.cache(form, 30, page, device)
    formats.write(keys.cache, form, torch.arange(t, device=device), tokens)
    return keys


def _check_sparse(names, spread, device, h, power):
    """Sparse decode over lists of two caches of these formats, and sparse prefill over the first."""
    drawn = problems.drawing(h, device)
    main, extra = (
        _lists(FORMS[name], spread, device, drawn, *sizes)
        for name, sizes in zip(names, ((190, 16), (70, 61)), strict=True)
    )
    parts = [keys.lists().keys() for keys in (main, extra)]
    keys, seen = (torch.cat(both, 1) for both in zip(*parts, strict=True))
    q, scale = problems_wide.queries(h, keys, seen, torch.bfloat16, power, drawn)
    decode = problems_sparse.Decode(q.view(3, 2, h, -1), main, extra, {"softmax_scale": scale})
    for num_splits in (None, 3):
        out, lse = decode.run(num_splits=num_splits)
        problems_wide.check(out.view(6, h, 512), lse.view(6, h), q, keys, seen, scale)
    first = problems_sparse.Keys(main.cache, main.indices.flatten(0, 1), None, main.kv_format)
    # A second time with so many lists that an H200's CTAs have several.
    for copies in (1, 40) if torch.device(device).type == "cuda" else (1,):
        lists = problems_sparse.Keys(first.cache, first.indices.repeat(copies, 1), None, first.kv_format)
        out, _, lse = problems_sparse.Prefill(q.repeat(copies, 1, 1), lists, {"softmax_scale": scale}).run()
        for some in (slice(6), slice(-6, None)):
            problems_wide.check(out[some], lse[some], q, *parts[0], scale, tolerance.SPARSE_PREFILL)


@each_number_of_heads
@each_query_size
@each_rope_size
def test_sparse_attention_over_float32_scales(device, rope, power, h):
    _check_sparse(("fp8_v32", "fp8_v32"), _v32(rope), device, h, power)


@each_number_of_heads
@pytest.mark.parametrize("whole", [0, -40, 30])
@pytest.mark.parametrize(
    "names", [("fp8_v4", "fp8_v41"), ("fp8_v41", "fp8_v4"), ("fp8_v41_split", "fp8_v41_split")], ids="+".join
)
def test_sparse_attention_over_ue8m0_scales(device, names, whole, h):
    _check_sparse(names, Spread((-20, 0), 14, whole=whole), device, h, 0)


# Every code under every scale, of either sign: numbers of up to 2,688.
@pytest.mark.parametrize("h", [8, 16, 32, 64, 128])
@pytest.mark.parametrize(
    "spread", [Spread((-3, 12), 14), Spread((8, 11), 14), Spread((-20, 0), 3)], ids=["any", "large", "small"]
)
@pytest.mark.parametrize("main", ["fp8_v41", "fp8_v41_split", "fp8_v4"])
def test_sparse_attention_beside_e2m1_codes(device, main, spread, h):
    _check_sparse((main, "fp4_v41"), spread, device, h, 0)


# At the ends of what counts in one (docs/sparse.md): scales of 2^-14 to 2; a row's 16-bit numbers, eight times
# their size together, of 2^-3 to 2^14.
@each_number_of_heads
@pytest.mark.parametrize(
    "spread",
    [
        pytest.param(Spread((8, 10), 13), id="all"),
        pytest.param(Spread((8, 11), 14), id="not scales"),
        pytest.param(Spread((8, 10), 13, rope=-13), id="small numbers"),
        pytest.param(Spread((8, 10), 13, rope=-30), id="not small numbers"),
        pytest.param(Spread((8, 10), 13, rope=1), id="large numbers"),
        pytest.param(Spread((8, 10), 13, rope=7), id="not large numbers"),
    ],
)
@pytest.mark.parametrize("names", [("fp8_v4", "fp8_v41"), ("fp8_v41_split", "fp8_v4")], ids="+".join)
def test_sparse_attention_at_the_ends_of_what_counts_in_one(device, names, spread, h):
    _check_sparse(names, spread, device, h, 0)
