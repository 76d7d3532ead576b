"""append_kv, gather_kv and empty_kv_cache."""

from __future__ import annotations

import pytest
import torch

import ferromla
import problems
import reference

DTYPES = [torch.bfloat16, torch.float16]


def _rows(count, width, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("page_size", [1, 61, 64])
def test_append_writes_each_token_to_its_slot_and_nothing_else(device, dtype, d_qk, page_size):
    cache = torch.full((9, page_size, d_qk), 3.0, dtype=dtype, device=device)
    want = cache.clone().view(-1, d_qk)
    rows = _rows(8, d_qk, dtype, device)
    slots = torch.randperm(9 * page_size, generator=torch.Generator().manual_seed(0))[:8].to(device)
    slots[2], slots[5], slots[6] = -1, 9 * page_size, 2**62
    for row, slot in enumerate(slots.tolist()):
        if 0 <= slot < len(want):
            want[slot] = rows[row]
    ferromla.append_kv(rows[:, :512], rows[:, 512:] if d_qk == 576 else None, cache, slots)
    assert torch.equal(cache.view(-1, d_qk), want)


def test_append_keeps_every_bit(device):
    """NaN payloads, infinities and denormals go through unchanged."""
    bits = (torch.arange(576) * 113).to(torch.int16).view(1, 576).to(device)
    cache = torch.zeros(2, 4, 576, dtype=torch.bfloat16, device=device)
    rows = bits.view(torch.bfloat16)
    ferromla.append_kv(rows[:, :512], rows[:, 512:], cache, torch.tensor([6], device=device))
    assert torch.equal(cache[1, 2].view(torch.int16), bits[0])


def test_append_to_a_two_part_and_a_four_dimensional_cache(device):
    rows = _rows(3, 576, torch.bfloat16, device)
    slots = torch.tensor([5, 70, 2], device=device)
    whole = torch.zeros(2, 64, 1, 576, dtype=torch.bfloat16, device=device)
    parts = tuple(torch.zeros(2, 64, width, dtype=torch.bfloat16, device=device) for width in (512, 64))
    ferromla.append_kv(rows[:, :512], rows[:, 512:], whole, slots)
    ferromla.append_kv(rows[:, :512], rows[:, 512:], parts, slots)
    assert torch.equal(whole[:, :, 0], torch.cat(parts, -1))
    assert torch.equal(whole.view(-1, 576)[slots], rows)


def test_append_of_no_tokens(device):
    cache = torch.zeros(2, 4, 576, dtype=torch.bfloat16, device=device)
    rows = _rows(0, 576, torch.bfloat16, device)
    ferromla.append_kv(rows[:, :512], rows[:, 512:], cache, torch.zeros(0, dtype=torch.int64, device=device))
    assert not cache.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("page_size", [16, 61])
def test_gather_by_pages(device, dtype, d_qk, page_size):
    problem = problems.make(lens=[0, 200, 1, 64, 0], h=1, dtype=dtype, d_qk=d_qk, page_size=page_size, device=device)
    out, offsets = ferromla.gather_kv(problem.cache, problem.table, problem.lens, num_tokens=265)
    assert offsets.tolist() == [0, 0, 200, 201, 265, 265]
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, problem.keys[problem.present][:, 0].bfloat16())


def test_gather_gives_zeros_for_absent_pages_and_for_rows_past_the_end(device):
    problem = problems.make(lens=[130, 70], h=1, device=device)
    problem.table[0, 1] = -3
    out = torch.full((230, 576), problems.NAN, dtype=torch.bfloat16, device=device)
    got, _ = ferromla.gather_kv(problem.cache, problem.table, problem.lens, out=out)
    assert got is out
    keys, _ = reference.gather(problem.cache, problem.table, problem.lens)
    assert torch.equal(out[:130], keys[0, :130, 0])
    assert not out[64:128].any()
    assert torch.equal(out[130:200], keys[1, :70, 0])
    assert not out[200:].any()


def test_gather_drops_tokens_past_the_last_row(device):
    problem = problems.make(lens=[130, 70], h=1, device=device)
    out, _ = ferromla.gather_kv(problem.cache, problem.table, problem.lens, num_tokens=140)
    assert torch.equal(out, problem.keys[problem.present][:140, 0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gather_by_ids(device, dtype):
    cache = _rows(6 * 16, 576, torch.float16, device).view(6, 16, 576)
    ids = torch.tensor([5, 95, -1, 0, 96, 2**31 - 1], dtype=dtype, device=device)
    out = ferromla.gather_kv(cache, ids=ids)
    flat = cache.view(-1, 576).bfloat16()
    want = torch.stack([flat[5], flat[95], flat[0] * 0, flat[0], flat[0] * 0, flat[0] * 0])
    assert torch.equal(out, want)


def test_gather_on_the_cpu_counts_for_itself():
    problem = problems.make(lens=[3, 70], h=1)
    problem.lens[0] = -4
    out, _ = ferromla.gather_kv(problem.cache, problem.table, problem.lens)
    assert out.shape == (70, 576)


@pytest.mark.gpu
def test_gather_on_cuda_asks_for_the_number_of_tokens(cuda):
    problem = problems.make(lens=[3, 70], h=1, device=cuda)
    with pytest.raises(ferromla.InvalidArgument, match="num_tokens"):
        ferromla.gather_kv(problem.cache, problem.table, problem.lens)


def test_gather_takes_pages_or_ids_not_both(device):
    problem = problems.make(lens=[3], h=1, device=device)
    for options in ({}, {"block_table": problem.table}, {"seq_lens": problem.lens}):
        with pytest.raises(ferromla.InvalidArgument, match="ids"):
            ferromla.gather_kv(problem.cache, **options)
    with pytest.raises(ferromla.InvalidArgument, match="ids"):
        ferromla.gather_kv(problem.cache, problem.table, problem.lens, ids=problem.lens)


def test_gather_refuses_a_negative_number_of_tokens(device):
    problem = problems.make(lens=[3], h=1, device=device)
    for source in ({"block_table": problem.table, "seq_lens": problem.lens}, {"ids": problem.lens}):
        with pytest.raises(ferromla.InvalidArgument) as caught:
            ferromla.gather_kv(problem.cache, **source, num_tokens=-1)
        assert caught.value.argument == "num_tokens"


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:-1", "meta", 0, None])
@pytest.mark.parametrize("framework", ["torch", "numpy", "cupy", None])
def test_an_empty_cache_on_an_unknown_device_is_refused_by_name(device, framework):
    with pytest.raises(ferromla.InvalidArgument) as caught:
        ferromla.empty_kv_cache(2, 64, "bf16", device, framework=framework)
    assert caught.value.argument == "device"


@pytest.mark.parametrize("kv_format", ["bf16", "fp16"])
def test_an_empty_cache_is_ready_for_use(device, kv_format):
    cache = ferromla.empty_kv_cache(5, 64, kv_format, device)
    assert cache.shape == (5, 64, 576)
    assert cache.device.type == device.type
    assert cache.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[kv_format]
    assert ferromla.empty_kv_cache(5, 64, kv_format, device, d_qk=512).shape == (5, 64, 512)


@pytest.mark.parametrize(
    ("kv_format", "width", "page"),
    [
        ("fp8", 576, 61 * 576),
        ("fp8_v32", 656, 61 * 656),
        ("fp8_v4", 584, 62 * 576),
        ("fp8_v41", 528, 61 * 528),
        ("fp8_v41_split", 528, 63 * 512),
        ("fp4_v41", 288, 61 * 288),
    ],
)
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_pages_of_an_empty_quantised_cache_begin_where_the_format_says(kv_format, width, page, framework):
    cache = ferromla.empty_kv_cache(5, 61, kv_format, framework=framework)
    assert cache.shape == (5, 61, width)
    strides = cache.stride() if framework == "torch" else cache.strides
    assert tuple(strides) == (page, width, 1)
    assert str(cache.dtype).endswith("float8_e4m3fn" if kv_format == "fp8" else "uint8")
    assert ferromla.empty_kv_cache(0, 61, kv_format, framework=framework).shape == (0, 61, width)


@pytest.mark.parametrize(
    ("arguments", "options", "argument", "error"),
    [
        ((-1, 64, "bf16"), {}, "num_pages", ferromla.InvalidArgument),
        ((1, 0, "bf16"), {}, "page_size", ferromla.InvalidArgument),
        ((1, 64, "int3"), {}, "kv_format", ferromla.InvalidArgument),
        ((1, 64, "fp8_v4"), {"d_qk": 576}, "d_qk", ferromla.InvalidArgument),
        ((1, 64, "bf16"), {"d_qk": 100}, "d_qk", ferromla.InvalidArgument),
        ((1, 64, "bf16"), {"framework": "cupy"}, "framework", ferromla.InvalidArgument),
        ((1, 64, "bf16"), {"framework": "jax"}, "framework", ferromla.InvalidArgument),
    ],
)
def test_an_impossible_cache_is_refused_by_name(arguments, options, argument, error):
    with pytest.raises(error) as caught:
        ferromla.empty_kv_cache(*arguments, "cpu", **options)
    assert caught.value.argument == argument
