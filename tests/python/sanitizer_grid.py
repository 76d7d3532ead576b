"""Every operation on a grid of small shapes, for compute-sanitizer: it is slow, so few and small."""

from __future__ import annotations

import itertools
import os
import sys

# torch's caching allocator would hide accesses past the end of a tensor.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

import ferromla
import problems


def main() -> int:
    """Run the grid; results are checked as well."""
    shapes = itertools.product((1, 3), (1, 2), (1, 16, 65, 128), (64, 61, 256))
    count = 0
    for b, s_q, h, page_size in shapes:
        for options in ({}, {"num_splits": 2}, {"batch_invariant": True, "causal": False}):
            dtype = (torch.bfloat16, torch.float16)[count % 2]
            d_qk = (576, 576, 512)[count % 3]
            problem = problems.make(
                b, s_q, h, seq=300, page_size=page_size, dtype=dtype, d_qk=d_qk, device="cuda", seed=count
            )
            problem.check(**options)
            count += 1
    count += prefills()
    problem = problems.make(h=126, h_kv=3, s_q=2, lens=[0, 130, 64], device="cuda")
    first, second = problem.check(), problem.check(num_splits=3)
    ferromla.merge_states(*first, *second)
    plan = ferromla.Plan(problem.lens, num_heads=126, num_kv_heads=3, q_len=2, page_size=64)
    plan.update(problem.lens.cpu())
    problem.check(plan=plan)
    cache_operations()
    torch.cuda.synchronize()
    print(f"{count + 3} calls of decode and prefill, and the cache operations")
    return 0


def prefills() -> int:
    """Ragged queries; gives the number of calls."""
    count = 0
    for h, page_size in itertools.product((1, 16, 65, 128), (64, 61)):
        for options in ({}, {"num_splits": 2}, {"batch_invariant": True, "causal": False}):
            problem = problems.make(
                h=h,
                lens=[300, 5, 0, 64, 130],
                q_lens=[4, 9, 1, 0, 40],
                page_size=page_size,
                dtype=(torch.bfloat16, torch.float16)[count % 2],
                d_qk=(576, 512)[count % 2],
                device="cuda",
                seed=count,
            )
            problem.check(**options)
            count += 1
    return count


def cache_operations() -> None:
    """append_kv and gather_kv, slots and ids past either end included."""
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
