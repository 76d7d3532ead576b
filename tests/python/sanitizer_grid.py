"""Every operation on a grid of small shapes, for compute-sanitizer: it is slow, so few and small. Results are checked
as well.

``python sanitizer_grid.py [SHARD SHARDS]`` runs every SHARDS-th case from number SHARD on."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

# torch's caching allocator would hide accesses past the end of a tensor.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

import ferromla
import problems
import problems_sparse
import tolerance

HEADS = (16, 32, 64, 128)
# Format, width, and the format of an extra cache beside it.
SPARSE = (
    ("bf16", 576, "bf16"),
    ("fp16", 512, "fp16"),
    ("fp8", 576, "fp8"),
    ("fp8", 512, "fp4_v41"),
    ("fp8_v32", 576, "bf16"),
    ("fp8_v4", 512, "fp8_v4"),
    ("fp8_v4", 512, "fp4_v41"),
    ("fp8_v41", 512, "fp4_v41"),
    ("fp8_v41_split", 512, "fp8_v41"),
)


def main() -> int:
    shard, shards = (int(word) for word in sys.argv[1:3]) if len(sys.argv) > 1 else (0, 1)
    cases = [case for number, case in enumerate(all_cases()) if number % shards == shard]
    for case in cases:
        case()
    torch.cuda.synchronize()
    print(f"{len(cases)} cases of shard {shard} of {shards}")
    return 0


def all_cases() -> Iterator[Callable[[], None]]:
    many = (partial(many_short_lists, kv_format) for kv_format in ("fp8_v4", "fp8_v41_split"))
    return itertools.chain(
        decodes(),
        prefills(),
        quantised(),
        sparse(),
        many,
        (several_kv_heads, many_requests, parts_by_count, cache_operations),
    )


def decodes() -> Iterator[Callable[[], None]]:
    """Dense decode."""
    shapes = itertools.product((1, 3), (1, 2), (1, 16, 65, 128), (64, 61, 256))
    modes = ({}, {"num_splits": 2}, {"batch_invariant": True, "causal": False})
    for number, ((b, s_q, h, page_size), options) in enumerate(itertools.product(shapes, modes)):
        yield partial(decode, b, s_q, h, page_size, options, number)


def decode(b, s_q, h, page_size, options, number):
    dtype, d_qk = (torch.bfloat16, torch.float16)[number % 2], (576, 576, 512)[number % 3]
    problems.make(b, s_q, h, seq=300, page_size=page_size, dtype=dtype, d_qk=d_qk, device="cuda", seed=number).check(
        **options
    )


def several_kv_heads():
    problem = problems.make(h=126, h_kv=3, s_q=2, lens=[0, 130, 64], device="cuda")
    first, second = problem.check(), problem.check(num_splits=3)
    ferromla.merge_states(*first, *second)
    plan = ferromla.Plan(problem.lens, num_heads=126, num_kv_heads=3, q_len=2, page_size=64)
    plan.update(problem.lens.cpu())
    problem.check(plan=plan)


def many_requests():
    """Planned by a cluster of CTAs: of one query token each, of a few, and of many for one of them."""
    lens = torch.randint(0, 5000, (900,), dtype=torch.int32, device="cuda")
    for heads, q_lens in ((16, None), (128, [2, 3] * 450), (128, [1] * 899 + [200])):
        ragged = {} if q_lens is None else {"qo_indptr": problems.offsets(q_lens).cuda(), "num_tokens": sum(q_lens)}
        ferromla.Plan(lens, num_heads=heads, page_size=64, max_seq_len=5000, **ragged).update(lens)


def parts_by_count():
    """Parts whose number the mode fixes, few that are dealt and more on the line."""
    lens = torch.randint(0, 9000, (900,), dtype=torch.int32, device="cuda")
    for requests, mode in itertools.product((3, 400, 900), ({"num_splits": 3}, {"batch_invariant": True})):
        ferromla.Plan(lens[:requests], num_heads=16, page_size=64, max_seq_len=9000, **mode)


def prefills() -> Iterator[Callable[[], None]]:
    """Ragged queries."""
    modes = ({}, {"num_splits": 2}, {"batch_invariant": True, "causal": False})
    for number, (h, page_size, options) in enumerate(itertools.product((1, 16, 65, 128), (64, 61), modes)):
        yield partial(prefill, h, page_size, options, number)


def prefill(h, page_size, options, number):
    problems.make(
        h=h,
        lens=[300, 5, 0, 64, 130],
        q_lens=[4, 9, 1, 0, 40],
        page_size=page_size,
        dtype=(torch.bfloat16, torch.float16)[number % 2],
        d_qk=(576, 512)[number % 2],
        device="cuda",
        seed=number,
    ).check(**options)


def quantised() -> Iterator[Callable[[], None]]:
    """Decode and prefill over quantised caches."""
    formats = (("fp8", 576), ("fp8", 512), ("fp8_v32", 576))
    ways = ((None, 64), ([3, 40, 0], 61))
    for number, ((kv_format, d_qk), h, way) in enumerate(itertools.product(formats, HEADS, ways)):
        yield partial(attention_over_codes, kv_format, d_qk, h, *way, number)


def attention_over_codes(kv_format, d_qk, h, q_lens, page_size, number):
    scale = {"kv_scale": 0.003} if kv_format == "fp8" else {}
    problem = problems.make(
        h=h,
        s_q=2,
        lens=[300, 130, 0],
        q_lens=q_lens,
        page_size=page_size,
        dtype=(torch.bfloat16, torch.float16)[number % 2],
        d_qk=d_qk,
        device="cuda",
        seed=number,
    ).quantised(kv_format, **scale)
    problem.check()
    problem.check(num_splits=2)
    if scale:
        problem.q = problem.q.to(torch.float8_e4m3fn)
        got = problem.call(**problem.options, q_scale=torch.ones(problem.q.shape[:-1], device="cuda"))
        problem.q = problem.q.bfloat16()
        tolerance.check(*got, *problem.expected(**problem.options))


def sparse() -> Iterator[Callable[[], None]]:
    """Sparse decode and prefill over caches of every format, with and without an extra one."""
    for number, (formats, h, with_extra) in enumerate(itertools.product(SPARSE, HEADS, (False, True))):
        yield partial(sparse_attention, *formats, h, with_extra, number)


def sparse_attention(kv_format, d_qk, extra, h, with_extra, number):
    dtype = torch.float16 if kv_format == "fp16" else torch.bfloat16
    common = {"h": h, "d_qk": d_qk, "dtype": dtype, "device": "cuda", "seed": number}
    # Half of the numbers have an extra cache: pages go by the others.
    decode = problems_sparse.decode(
        topk=150, page=(64, 61)[number // 2 % 2], extra=(90, 70, 5) if with_extra else None, lens="row", **common
    )
    prefill = problems_sparse.prefill(9, s_kv=200, page=(1, 64, 61)[number % 3], lens="row", **common)
    if kv_format not in ("bf16", "fp16"):
        decode.main, prefill.keys = decode.main.quantised(kv_format), prefill.keys.quantised(kv_format)
    if with_extra:
        plain = extra in ("bf16", "fp16")
        decode.extra = replace(decode.extra, kv_format=extra) if plain else decode.extra.quantised(extra)
    decode.check()
    decode.check(num_splits=2)
    prefill.check()
    # Lists that several CTAs have parts of.
    few = problems_sparse.prefill(
        (3, 9)[number % 2], s_kv=900, topk=(2500, 2048)[number % 2], lens="row", page=64, **common
    )
    if kv_format not in ("bf16", "fp16"):
        few.keys = few.keys.quantised(kv_format)
    few.check()


def many_short_lists(kv_format: str) -> None:
    """More lists of codes than an H200 has SMs."""
    prefill = problems_sparse.prefill(170, 64, s_kv=200, topk=70, lens="row", page=61, d_qk=512, device="cuda")
    prefill.keys = prefill.keys.quantised(kv_format)
    prefill.check()


def cache_operations() -> None:
    """The operations on caches, slots and ids past either end included."""
    for kv_format, d_qk, _ in (*SPARSE[2:], ("fp4_v41", 512, None)):
        rows = torch.randn(5, 61, d_qk, device="cuda").bfloat16()
        cache = ferromla.quantize_kv(rows, kv_format)
        slots = torch.tensor([-1, 0, 3, 5 * 61, 4, 2**40, 5 * 61 - 1], device="cuda")
        new = rows[0, :7]
        parts = (new, None) if d_qk == 512 else (new[:, :512], new[:, 512:])
        ferromla.append_kv(*parts, cache, slots, kv_format=kv_format)
        ferromla.gather_kv(cache, ids=slots, kv_format=kv_format)
        ferromla.dequantize_kv(cache, kv_format)
    for page_size, d_qk in itertools.product((1, 61, 64), (576, 512)):
        cache = torch.zeros(5, page_size, d_qk, dtype=torch.bfloat16, device="cuda")
        rows = torch.randn(7, d_qk, device="cuda").bfloat16()
        slots = torch.tensor([-1, 0, 3, 5 * page_size, 4, 2**40, 5 * page_size - 1], device="cuda")
        ferromla.append_kv(rows[:, :512], rows[:, 512:] if d_qk == 576 else None, cache, slots)
        ferromla.gather_kv(cache, ids=slots)
        table = torch.tensor([[4, 9, -1], [0, 1, 2]], dtype=torch.int32, device="cuda")
        lens = torch.tensor([3 * page_size, 2], dtype=torch.int32, device="cuda")
        ferromla.gather_kv(cache, table, lens, num_tokens=3 * page_size + 1)


if __name__ == "__main__":
    sys.exit(main())
