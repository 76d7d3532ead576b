"""Quantised caches written byte by byte, without the library's quantisation."""

from __future__ import annotations

import torch

import ferromla
import problems
import reference_formats as formats


def cache(form: formats.Format, pages: int, page_size: int, device) -> torch.Tensor:
    """A cache of NaN in all its bytes, of uint8."""
    made = ferromla.empty_kv_cache(pages, page_size, form.name, device, d_qk=form.d_qk).view(torch.uint8)
    return made.fill_(0xFF)


def page(tokens: formats.Tokens, form: formats.Format, s: int, lens, *, page_size) -> tuple[torch.Tensor, torch.Tensor]:
    """``(cache, table)`` of the first ``lens [b]`` of ``s`` tokens each of the requests: paged as ``problems.page``
    does, with NaN in all that no request owns."""
    b = len(lens)
    # Which token is where: their numbers, paged as rows are.
    numbers = torch.arange(b * s, dtype=torch.float64, device=lens.device).view(b, s, 1, 1)
    paged, table = problems.page(numbers, lens, page_size, torch.Generator().manual_seed(1))
    owned = ~paged.flatten().isnan()
    made = cache(form, len(paged), page_size, lens.device)
    formats.write(made, form, owned.nonzero().flatten(), tokens[paged.flatten()[owned].long()])
    return made, table
