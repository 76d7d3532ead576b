"""Attention over listed keys by the textbook, in float64: it shares nothing with the library."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reference import D_V, with_sink

# Numbers of one step of the work, on the CPU and on a GPU: the float64 keys of all rows would not fit in memory.
STEP = {"cpu": 2**21, "cuda": 2**26}


@dataclass
class Lists:
    """The keys of ``rows`` query tokens in one cache: ``tokens [n, d]``, ``indices [rows, topk]``, of which the
    first ``lens [rows]`` count; None for all."""

    tokens: torch.Tensor
    indices: torch.Tensor
    lens: torch.Tensor | None = None

    def of_rows(self, which) -> Lists:
        """The lists of some of the query tokens."""
        return Lists(self.tokens, self.indices[which], None if self.lens is None else self.lens[which])

    def chosen(self) -> torch.Tensor:
        """``[rows, topk]`` bool: which entries are keys."""
        there = (self.indices >= 0) & (self.indices.long() < len(self.tokens))
        if self.lens is None:
            return there
        position = torch.arange(self.indices.shape[1], device=self.indices.device)
        return there & (position < self.lens[:, None])

    def keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``(keys [rows, topk, d], chosen [rows, topk])``: float64, zeros where an entry is no key."""
        chosen = self.chosen()
        if not len(self.tokens):
            return self.tokens.new_zeros(*chosen.shape, self.tokens.shape[1], dtype=torch.float64), chosen
        keys = self.tokens[torch.where(chosen, self.indices, 0)]
        return keys.masked_fill_(~chosen[..., None], 0).double(), chosen

    def used(self) -> torch.Tensor:
        """``[n]`` bool: the tokens that are some row's key."""
        # Entries that are no key count for a token behind the last one.
        used = torch.zeros(len(self.tokens) + 1, dtype=torch.bool, device=self.tokens.device)
        keys = torch.where(self.chosen(), self.indices, len(self.tokens))
        return used.index_fill_(0, keys.flatten().long(), True)[:-1]


def attention(
    q: torch.Tensor, lists: list[Lists], *, scale: float | None = None, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax attention of ``q [rows, h, d]`` over the keys of all lists.

    Gives ``out [rows, h, 512]``, ``max_logits [rows, h]`` and ``lse [rows, h]`` in float64.
    """
    rows, h, d = q.shape
    scale = d**-0.5 if scale is None else scale
    out = torch.zeros(rows, h, D_V, dtype=torch.float64, device=q.device)
    max_logits = torch.full((rows, h), -torch.inf, dtype=torch.float64, device=q.device)
    lse = max_logits.clone()
    keys_of_row = sum(part.indices.shape[1] for part in lists)
    step = max(1, STEP[q.device.type] // max(1, keys_of_row * max(d, h)))
    for first in range(0, rows if keys_of_row else 0, step):
        part = slice(first, first + step)
        pairs = [one.of_rows(part).keys() for one in lists]
        keys, chosen = (torch.cat(both, 1) for both in zip(*pairs, strict=True)) if len(pairs) > 1 else pairs[0]
        scores = (q[part].double() * scale) @ keys.transpose(1, 2)
        scores.masked_fill_(~chosen[:, None], -torch.inf)
        max_logits[part] = scores.amax(-1)
        lse[part] = torch.logsumexp(scores, -1)
        finite = torch.where(torch.isneginf(lse[part]), 0.0, lse[part])
        out[part] = scores.sub_(finite[..., None]).exp_() @ keys[..., :D_V]
    return with_sink(out, lse, sink), max_logits, lse
