"""Attention over listed keys by the textbook, in float64: it shares nothing with the library."""

from __future__ import annotations

from dataclasses import dataclass

import torch

D_V = 512
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

    def keys(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """``(keys [rows, topk, d], chosen [rows, topk])`` of some rows."""
        chosen = self.chosen()[part]
        rows, topk = chosen.shape
        keys = torch.zeros(rows, topk, self.tokens.shape[1], dtype=torch.float64, device=chosen.device)
        keys[chosen] = self.tokens[self.indices[part][chosen].long()].double()
        return keys, chosen


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
        pairs = [one.keys(part) for one in lists]
        keys, chosen = (torch.cat(both, 1) for both in zip(*pairs, strict=True))
        scores = q[part].double() @ keys.transpose(1, 2) * scale
        scores.masked_fill_(~chosen[:, None], -torch.inf)
        max_logits[part] = scores.amax(-1)
        lse[part] = torch.logsumexp(scores, -1)
        finite = torch.where(torch.isneginf(lse[part]), 0.0, lse[part])
        out[part] = torch.exp(scores - finite[..., None]) @ keys[..., :D_V]
    if sink is not None:
        # exp(lse) / (exp(lse) + exp(sink)), which is 0 for a row without keys.
        factor = torch.where(torch.isneginf(lse), 0.0, torch.sigmoid(lse - sink.double()))
        out = out * factor[..., None]
    return out, max_logits, lse
