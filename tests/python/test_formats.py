"""Quantised caches, byte by byte and number by number, against reference_formats."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import ferromla
import reference_formats as formats

each_format = pytest.mark.parametrize("form", formats.FORMATS, ids=lambda form: f"{form.name}-{form.d_qk}")
each_page_size = pytest.mark.parametrize("page_size", [1, 2, 61, 64])
SOURCE_TYPES = [torch.bfloat16, torch.float16, torch.float32]


def _rows(count, width, dtype=torch.float32, device="cpu", seed=0):
    """Rows whose groups are of very different sizes, and some of numbers that are hard to quantise."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-24, 12, (count, width // 16), generator=generator).repeat_interleave(16, 1)
    rows = torch.randn(count, width, generator=generator) * torch.exp2(exponents.float())
    hard = [0.0, -0.0, 448.0, 464.0, -465.0, 1e-40, 65504.0, torch.inf, -torch.inf]
    for row, number in zip(rows, hard, strict=False):
        row[: min(width, 512)] = number
    if count > 12:
        rows[10, ::7] = 1e30
        rows[11, 3:448:50] = torch.nan
        rows[12, :128], rows[12, 128:448] = torch.nan, -0.0
    return rows.to(device, dtype)


def _quantisation(form):
    """Options of the quantisation that are not the defaults."""
    if form.scale is None:
        return {"kv_scale": 0.37}
    return {"round_scale": False} if form.scale == "float32" else {}


def _cache(form, num_pages, page_size, device, fill=0xAA):
    cache = ferromla.empty_kv_cache(num_pages, page_size, form.name, device, d_qk=form.d_qk)
    cache.view(torch.uint8).fill_(fill)
    return cache


def _random_bytes(form, num_pages, page_size, device):
    """A cache of any bytes at all: every code, every scale."""
    cache = _cache(form, num_pages, page_size, device)
    generator = torch.Generator().manual_seed(page_size)
    cache.view(torch.uint8).copy_(torch.randint(0, 256, cache.shape, generator=generator, dtype=torch.uint8))
    return cache


def _assert_tokens(got, want):
    for part in ("codes", "scales", "rope"):
        assert torch.equal(getattr(got, part), getattr(want, part)), part


def _assert_numbers(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@each_format
@each_page_size
@pytest.mark.parametrize("dtype", SOURCE_TYPES, ids=str)
def test_quantize_writes_the_bytes_of_the_format(device, form, page_size, dtype):
    rows = _rows(3 * page_size, form.d_qk, dtype, device)
    for options in ({}, _quantisation(form)):
        cache = ferromla.quantize_kv(rows.view(3, page_size, form.d_qk), form.name, **options)
        like = ferromla.empty_kv_cache(3, page_size, form.name, device, d_qk=form.d_qk)
        assert (cache.shape, cache.stride(), cache.dtype) == (like.shape, like.stride(), like.dtype)
        _assert_tokens(formats.read(cache, form), formats.quantise(rows, form, **options))


@each_format
@each_page_size
def test_dequantize_reads_any_bytes(device, form, page_size):
    cache = _random_bytes(form, 5, page_size, device)
    options = {"kv_scale": 0.37} if form.scale is None else {}
    want = formats.dequantise(formats.read(cache, form), form, **options)
    got = ferromla.dequantize_kv(cache, form.name, dtype=torch.float32, **options)
    assert got.shape == (5, page_size, form.d_qk)
    _assert_numbers(got.flatten(0, 1), want)
    got = ferromla.dequantize_kv(cache, form.name, **options)
    assert got.dtype == torch.bfloat16
    _assert_numbers(got.flatten(0, 1), want.bfloat16())


@each_format
def test_every_code_survives_a_round_trip(device, form):
    """Under scales that come back too, since the largest code is in every group."""
    codes = torch.arange(256).repeat(4)
    codes = torch.stack([codes[start : start + form.code_bytes] for start in range(0, 256, 8)]).to(torch.uint8)
    if form.codes == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0  # NaN, whose sign alone comes back
        codes[:, :: form.group or 576] = 0x7E
    else:
        codes[:, :: form.group // 2] = 0x17
    scales = torch.full((32, form.scale_bytes), 0x38, dtype=torch.uint8)
    if form.scale == "float32":
        scales = torch.full((32, 4), 0.25).view(torch.uint8)
    if form.name == "fp8_v4":
        scales[:, 7] = 0
    tokens = formats.Tokens(codes.to(device), scales.to(device), torch.zeros(32, form.rope_bytes).byte().to(device))
    cache = _cache(form, 4, 8, device)
    formats.write(cache, form, torch.arange(32, device=device), tokens)
    options = {"kv_scale": 0.25} if form.scale is None else {}
    rows = ferromla.dequantize_kv(cache, form.name, dtype="float32", **options)
    _assert_tokens(formats.read(ferromla.quantize_kv(rows, form.name, **options), form), tokens)


@each_format
@each_page_size
@pytest.mark.parametrize("dtype", SOURCE_TYPES, ids=str)
def test_append_writes_each_token_to_its_slot_and_nothing_else(device, form, page_size, dtype):
    rows = _rows(20, form.d_qk, dtype, device)
    cache = _cache(form, 21, page_size, device)
    want = _copy(cache)
    slots = torch.randperm(21 * page_size, generator=torch.Generator().manual_seed(0))[:20].to(device)
    slots[2], slots[5], slots[6] = -1, 21 * page_size, 2**62
    inside = (slots >= 0) & (slots < 21 * page_size)
    options = _quantisation(form)
    formats.write(want, form, slots[inside], formats.quantise(rows, form, **options)[inside])
    rope = rows[:, 512:] if form.d_qk == 576 else None
    ferromla.append_kv(rows[:, :512], rope, cache, slots, kv_format=form.name, **options)
    _assert_tokens(formats.read(cache, form), formats.read(want, form))
    # What lies between pages is nobody's.
    assert torch.equal(_memory(cache), _memory(want))


def _memory(cache):
    """All bytes of the allocation of a cache."""
    whole = cache.view(torch.uint8)
    return whole.as_strided((whole.untyped_storage().nbytes(),), (1,), 0)


def _copy(cache):
    """A copy with the same strides, padding included."""
    memory = _memory(cache).clone()
    return memory.as_strided(cache.shape, cache.stride(), cache.storage_offset()).view(cache.dtype)


@each_format
@each_page_size
def test_gather_dequantises(device, form, page_size):
    cache = _random_bytes(form, 7, page_size, device)
    options = {"kv_scale": 0.37} if form.scale is None else {}
    want = formats.dequantise(formats.read(cache, form), form, **options).bfloat16()
    ids = torch.tensor([3, 7 * page_size - 1, -1, 0, 7 * page_size, 5], device=device)
    out = ferromla.gather_kv(cache, ids=ids, kv_format=form.name, **options)
    present = (ids >= 0) & (ids < 7 * page_size)
    _assert_numbers(out[present], want[ids[present]])
    assert not out[~present].any()
    table = torch.tensor([[4, 2], [6, -1]], dtype=torch.int32, device=device)
    lens = torch.tensor([page_size + 1, page_size + 1], dtype=torch.int32, device=device)
    total = 2 * page_size + 2
    out, offsets = ferromla.gather_kv(cache, table, lens, kv_format=form.name, num_tokens=total, **options)
    assert offsets.tolist() == [0, page_size + 1, total]
    want = want.view(7, page_size, -1)
    _assert_numbers(out[:-1], torch.cat([want[4], want[2, :1], want[6]]))
    assert not out[-1].any()


@each_format
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_padded_strides(device, form, page_size):
    """Pages, and where the format allows it tokens, further apart than they need be."""
    rows = _rows(4 * page_size, form.d_qk, torch.bfloat16, device)
    token = form.bytes if form.split else form.bytes + 32
    page = -(-page_size * token // 16) * 16 + 64
    memory = torch.full((4 * page + 16,), 0xAA, dtype=torch.uint8, device=device)
    cache = memory.as_strided((4, page_size, form.bytes), (page, token, 1), 16)
    untouched = torch.ones_like(memory, dtype=torch.bool)
    untouched.as_strided(cache.shape, cache.stride(), 16).fill_(False)
    given = ferromla.quantize_kv(rows.view(4, page_size, -1), form.name, out=cache)
    assert given is cache
    want = formats.quantise(rows, form)
    _assert_tokens(formats.read(cache, form), want)
    assert bool((memory[untouched] == 0xAA).all())
    numbers = formats.dequantise(want, form)
    out = ferromla.dequantize_kv(cache, form.name, dtype="float32")
    _assert_numbers(out.flatten(0, 1), numbers)
    ids = torch.arange(4 * page_size, device=device).flip(0)
    _assert_numbers(ferromla.gather_kv(cache, ids=ids, kv_format=form.name), numbers.bfloat16().flip(0))


@each_format
def test_sources_and_results_of_any_strides(device, form):
    wide = _rows(6 * 8, form.d_qk + 64, torch.float32, device).view(6, 8, -1)
    rows = wide.transpose(0, 1)[..., : form.d_qk]
    cache = ferromla.quantize_kv(rows, form.name)
    plain = ferromla.quantize_kv(rows.contiguous(), form.name)
    _assert_tokens(formats.read(cache, form), formats.read(plain, form))
    whole = torch.full((6, 8, form.d_qk + 64), 7.0, device=device)
    out = whole.transpose(0, 1)[..., : form.d_qk]
    assert ferromla.dequantize_kv(cache, form.name, out=out) is out
    _assert_numbers(out, ferromla.dequantize_kv(cache, form.name, dtype="float32"))
    assert bool((whole[..., form.d_qk :] == 7).all())


@each_format
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
def test_bytes_of_every_name_and_rank(device, form, dtype):
    rows = _rows(32, form.d_qk, torch.float16, device)
    cache = _cache(form, 2, 16, device).view(dtype)
    want = formats.quantise(rows, form)
    ferromla.quantize_kv(rows.view(2, 16, 1, -1), form.name, out=cache.unsqueeze(2))
    _assert_tokens(formats.read(cache, form), want)
    numbers = formats.dequantise(want, form)
    got = ferromla.dequantize_kv(cache.unsqueeze(2), form.name, dtype=torch.float32)
    _assert_numbers(got.flatten(0, 1), numbers)
    slots = torch.arange(32, device=device).flip(0)
    rope = rows[:, 512:] if form.d_qk == 576 else None
    ferromla.append_kv(rows[:, :512], rope, cache.unsqueeze(2), slots, kv_format=form.name)
    _assert_tokens(formats.read(cache, form)[slots], want)


def test_float8_says_its_own_format(device):
    rows = _rows(32, 576, torch.bfloat16, device).view(2, 16, 576).nan_to_num(0, 448, -448)
    cache = ferromla.quantize_kv(rows, "fp8")
    assert cache.dtype == torch.float8_e4m3fn
    assert torch.equal(cache.view(torch.uint8), rows.float().clamp(-448, 448).to(cache.dtype).view(torch.uint8))
    _assert_numbers(ferromla.dequantize_kv(cache), cache.bfloat16())
    _assert_numbers(ferromla.gather_kv(cache, ids=torch.arange(32, device=device)), cache.bfloat16().flatten(0, 1))
    ferromla.append_kv(rows[0, :1, :512], rows[0, :1, 512:], cache, torch.tensor([5], device=device))
    assert torch.equal(cache[0, 5].view(torch.uint8), cache[0, 0].view(torch.uint8))


@each_format
def test_numpy(form):
    rows = _rows(30, form.d_qk)
    cache = ferromla.quantize_kv(rows.view(6, 5, -1).numpy(), form.name)
    assert isinstance(cache, np.ndarray)
    assert cache.dtype == (ml_dtypes.float8_e4m3fn if form.scale is None else np.uint8)
    want = ferromla.quantize_kv(rows.view(6, 5, -1), form.name)
    assert cache.strides == want.stride()
    assert np.array_equal(cache.view(np.uint8), want.view(torch.uint8).numpy())
    numbers = ferromla.dequantize_kv(cache, form.name, dtype=np.float32)
    assert np.array_equal(numbers, ferromla.dequantize_kv(want, form.name, dtype="float32").numpy(), equal_nan=True)
    assert ferromla.dequantize_kv(cache, form.name, dtype=ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16


@each_format
def test_caches_of_no_pages_and_no_tokens(device, form):
    cache = ferromla.quantize_kv(torch.zeros(0, 64, form.d_qk, device=device), form.name)
    assert cache.shape == (0, 64, form.bytes)
    assert ferromla.dequantize_kv(cache, form.name).shape == (0, 64, form.d_qk)
    assert (
        ferromla.gather_kv(cache, ids=torch.zeros(0, dtype=torch.int64, device=device), kv_format=form.name).numel()
        == 0
    )


def _call():
    return {
        "kv": torch.zeros(3, 5, 512),
        "cache": torch.zeros(3, 5, 528, dtype=torch.uint8),
        "kv_format": "fp8_v41",
    }


# name: (argument that quantize_kv names, argument that dequantize_kv names, what changes)
BAD = {
    "format": ("kv_format", "kv_format", {"kv_format": "fp8_v42"}),
    "format of the cache's dtype": ("kv_format", "kv_format", {"kv_format": "bf16"}),
    "bytes": ("out", "cache", {"cache": torch.zeros(3, 5, 584, dtype=torch.uint8)}),
    "rank of the cache": ("out", "cache", {"cache": torch.zeros(5, 528, dtype=torch.uint8)}),
    "dtype of the cache": ("kv_format", "kv_format", {"cache": torch.zeros(3, 5, 528)}),
    "heads": ("out", "cache", {"cache": torch.zeros(3, 5, 2, 528, dtype=torch.uint8)}),
    "width": ("kv", "out", {"kv": torch.zeros(3, 5, 576)}),
    "pages": ("out", "out", {"kv": torch.zeros(4, 5, 512)}),
    "page size": ("out", "out", {"kv": torch.zeros(3, 6, 512)}),
    "dtype of the rows": ("kv", "out", {"kv": torch.zeros(3, 5, 512, dtype=torch.float64)}),
    "scale": ("kv_scale", "kv_scale", {"kv_scale": 2.0}),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused_by_name(name):
    quantize_argument, dequantize_argument, change = BAD[name]
    call = {**_call(), **change}
    options = {"kv_scale": call.get("kv_scale")}
    with pytest.raises(ferromla.InvalidArgument) as caught:
        ferromla.quantize_kv(call["kv"], call["kv_format"], out=call["cache"], **options)
    assert caught.value.argument == quantize_argument
    with pytest.raises(ferromla.InvalidArgument) as caught:
        ferromla.dequantize_kv(call["cache"], call["kv_format"], out=call["kv"], **options)
    assert caught.value.argument == dequantize_argument
    assert not call["kv"].any()


def test_quantised_bytes_do_not_say_their_format():
    cache = torch.zeros(2, 16, 656, dtype=torch.uint8)
    rows, slots = torch.zeros(3, 576), torch.arange(3)
    for call in (
        lambda: ferromla.dequantize_kv(cache),
        lambda: ferromla.gather_kv(cache, ids=slots),
        lambda: ferromla.append_kv(rows[:, :512], rows[:, 512:], cache, slots),
    ):
        with pytest.raises(ferromla.InvalidArgument, match="uint8") as caught:
            call()
        assert caught.value.argument == "kv_format"


def test_other_refusals_name_their_argument():
    split = torch.zeros(2, 16 * 600, dtype=torch.uint8).as_strided((2, 16, 584), (16 * 600, 600, 1))
    with pytest.raises(ferromla.InvalidArgument, match="584 bytes apart") as caught:
        ferromla.dequantize_kv(split, "fp8_v4")
    assert caught.value.argument == "cache"
    cache = torch.zeros(2, 16, 528, dtype=torch.uint8)
    with pytest.raises(ferromla.InvalidArgument, match="bfloat16 or float32") as caught:
        ferromla.dequantize_kv(cache, "fp8_v41", dtype=torch.float16)
    assert caught.value.argument == "dtype"
    with pytest.raises(ferromla.InvalidArgument, match="that of out") as caught:
        ferromla.dequantize_kv(cache, "fp8_v41", out=torch.zeros(2, 16, 512), dtype="bfloat16")
    assert caught.value.argument == "dtype"
    with pytest.raises(ferromla.InvalidArgument, match="512 numbers") as caught:
        ferromla.quantize_kv(torch.zeros(2, 16, 576), "fp4_v41")
    assert caught.value.argument == "kv"
    with pytest.raises(ferromla.InvalidArgument, match="num_pages") as caught:
        ferromla.quantize_kv(torch.zeros(576), "fp8")
    assert caught.value.argument == "kv"
    rows = torch.zeros(3, 512)
    with pytest.raises(ferromla.InvalidArgument, match="rows of 512") as caught:
        ferromla.append_kv(rows, rows[:, :64], cache, torch.arange(3), kv_format="fp8_v41")
    assert caught.value.argument == "k_pe"
