"""Decode with a cache that is shared out among GPUs: each rank attends to the pages it holds; what it gets is merged.

    torchrun --nproc-per-node 2 examples/context_parallel.py

Page ``j`` of a request is on rank ``j % ranks``, so that contexts may be as many times longer as there are GPUs. Each
step a rank decodes over its own pages, which gives partial results with their log-sum-exps; torch.distributed sends
every rank the parts of its share of the heads (NCCL where each rank has a GPU, else gloo), and ``merge_states`` joins
them. A rank that holds no token of a request gives ``lse = -inf``, which merges as nothing.

Random numbers; every rank compares its heads with a decode over the whole cache and exits with 1 if they differ by more
than 16-bit storage explains.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import ferromla

HEADS, PAGE_SIZE, WIDTH, LATENT = 128, 64, 576, 512
CONTEXTS = (1, 64, 200, 1500, 3000)
# Parts, what they are merged to, and the result over all keys are rounded to bfloat16: up to 2^-9 of a number each.
LIMIT = 8 * 2**-9


def own_pages(table: torch.Tensor, lens: torch.Tensor, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of the block table that are on this rank, and how many tokens of each request are in them."""
    columns = torch.arange(table.shape[1], device=table.device)
    in_page = (lens[:, None] - columns * PAGE_SIZE).clamp(0, PAGE_SIZE)
    own = columns % ranks == rank
    return table[:, own].contiguous(), in_page[:, own].sum(1, dtype=torch.int32)


def decode_shared_out(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """``[b, 1, heads / ranks, 512]``: this rank's heads over the tokens of all ranks. ``table``, ``lens``: its own."""
    ranks = dist.get_world_size()
    # The query token is the last of its request, wherever that is: it sees all that a rank holds.
    out, lse = ferromla.decode(q, cache, table, lens, causal=False)
    outs, lses = (torch.stack([x.contiguous() for x in part.chunk(ranks, dim=2)]) for part in (out, lse))
    their_outs, their_lses = torch.empty_like(outs), torch.empty_like(lses)
    dist.all_to_all_single(their_outs, outs)
    dist.all_to_all_single(their_lses, lses)
    merged = their_outs[0], their_lses[0]
    for part in zip(their_outs[1:], their_lses[1:], strict=True):
        merged = ferromla.merge_states(*merged, *part)
    return merged[0]


def main() -> int:
    """Decodes both ways on every rank."""
    on_gpus = torch.cuda.device_count() > 0
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    torch.manual_seed(0)  # the same numbers on every rank, which uses its own
    lens = torch.tensor(CONTEXTS, dtype=torch.int32)
    columns = -(-max(CONTEXTS) // PAGE_SIZE)
    table = torch.randperm(len(CONTEXTS) * columns, dtype=torch.int32).view(len(CONTEXTS), columns)
    q = torch.randn(len(CONTEXTS), 1, HEADS, WIDTH)
    cache = torch.randn(table.numel(), PAGE_SIZE, WIDTH)
    q, cache = (x.to(device, torch.bfloat16) for x in (q, cache))
    table, lens = table.to(device), lens.to(device)

    found = decode_shared_out(q, cache, *own_pages(table, lens, rank, ranks))
    whole = ferromla.decode(q, cache, table, lens)[0].chunk(ranks, dim=2)[rank]
    worst = ((found - whole).abs() / whole.abs().amax(-1, keepdim=True)).max().item()
    print(f"rank {rank} of {ranks} on {device}: off by {worst:.1e} of the largest number, {LIMIT:.1e} are allowed")
    dist.destroy_process_group()
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
