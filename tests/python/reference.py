"""Attention by the textbook, in float64, over keys laid out plainly: it shares nothing with the library."""

from __future__ import annotations

import torch

D_V = 512
# Numbers of one step of the work: float64 keys and scores of a large batch would not fit in memory.
STEP = 2**26


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    present: torch.Tensor,
    lens: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of each request over its own keys.

    ``q [b, s_q, h, d]``, ``keys [b, s, h_kv, d]``, ``present [b, s]`` bool, ``lens [b]``; gives
    ``out [b, s_q, h, 512]`` and ``lse [b, s_q, h]`` in float64.
    """
    b, s_q, h, d = q.shape
    out = torch.zeros(b, s_q, h, D_V, dtype=torch.float64, device=q.device)
    lse = torch.full((b, s_q, h), -torch.inf, dtype=torch.float64, device=q.device)
    scale = d**-0.5 if scale is None else scale
    of_request = keys.shape[1] * (s_q * h + 2 * keys.shape[2] * d)
    step = max(1, STEP // max(1, of_request))
    if keys.shape[1]:
        for first in range(0, b, step):
            part = slice(first, first + step)
            out[part], lse[part] = _attend(q[part], keys[part], present[part], lens[part], causal, scale)
    return with_sink(out, lse, sink), lse


def with_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """``out [..., h, 512]`` times ``exp(lse) / (exp(lse) + exp(sink))``, which is 0 for a row without keys."""
    if sink is None:
        return out
    factor = torch.where(torch.isneginf(lse), 0.0, torch.sigmoid(lse - sink.double()))
    return out * factor.unsqueeze(-1)


def ragged_attention(q, indptr, keys, present, lens, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention where the query tokens of request ``r`` are ``indptr[r] .. indptr[r + 1]`` of ``q [t, h, d]``.
    Gives ``out [t, h, 512]`` and ``lse [t, h]``, NaN for tokens of nobody before the first and after the last."""
    q_lens = indptr.long().diff()
    longest = int(q_lens.max()) if len(q_lens) else 0
    # The tokens of a request along an axis of its own, the last one at the end as for the causal mask.
    own = torch.arange(longest, device=q.device) >= longest - q_lens[:, None]
    used = slice(int(indptr[0]), int(indptr[-1]))
    padded = q.new_zeros(len(q_lens), longest, *q.shape[1:])
    padded[own] = q[used]
    out = torch.full((*q.shape[:-1], D_V), torch.nan, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:-1], torch.nan, dtype=torch.float64, device=q.device)
    padded_out, padded_lse = attention(padded, keys, present, lens, **options)
    out[used], lse[used] = padded_out[own], padded_lse[own]
    return out, lse


def _attend(q, keys, present, lens, causal, scale):
    b, s_q, h, d = q.shape
    s, h_kv = keys.shape[1], keys.shape[2]
    group = h // h_kv
    # [b, h_kv, s_q * group, d] times [b, h_kv, d, s]
    rows = (q.double() * scale).view(b, s_q, h_kv, group, d).transpose(1, 2).reshape(b, h_kv, s_q * group, d)
    keys = torch.where(present[:, :, None, None], keys, 0).double().permute(0, 2, 1, 3)
    scores = (rows @ keys.transpose(-1, -2)).view(b, h_kv, s_q, group, s)
    position = torch.arange(s, device=q.device)
    last = torch.arange(s_q, device=q.device) + (lens[:, None] - s_q if causal else torch.iinfo(torch.int32).max)
    seen = (position <= last[..., None]) & present[:, None, :]
    scores.masked_fill_(~seen[:, None, :, None, :], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = scores.sub_(torch.where(torch.isneginf(lse), 0.0, lse).unsqueeze(-1)).exp_()
    values = weights.view(b, h_kv, s_q * group, s) @ keys[..., :D_V]
    out = values.view(b, h_kv, s_q, group, D_V).transpose(1, 2).reshape(b, s_q, h, D_V)
    return out, lse.transpose(1, 2).reshape(b, s_q, h)


def gather(cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys of each request, plainly: ``(keys [b, capacity, h_kv, d], present [b, capacity])``."""
    n, page_size = cache.shape[:2]
    flat = cache.reshape(n * page_size, -1, cache.shape[-1])
    position = torch.arange(table.shape[1] * page_size, device=cache.device)
    page = table.long()[:, position // page_size] if len(position) else table.long()
    present = (page >= 0) & (page < n) & (position < lens[:, None])
    slot = torch.where(present, page * page_size + position % page_size, 0)
    keys = flat[slot.clamp(max=max(n * page_size - 1, 0))]
    return torch.where(present[..., None, None], keys, 0), present
