"""Tokens of quantised caches whose scales differ widely, and the comparison of results whose elements do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import problems
import reference_formats as formats
import tolerance

# Of the scores of a query token, the largest magnitude.
LARGEST_SCORE = 4.0
# The mean magnitude of numbers that the absolute tolerance of out is meant for.
USUAL_MAGNITUDE = problems.KEY_DEVIATION * (2 / torch.pi) ** 0.5
# Below, an element of out has fewer bits than the tolerance asks for.
LEAST = {torch.float16: 2.0**-12, torch.bfloat16: 2.0**-126}


@dataclass(frozen=True)
class Spread:
    """Powers of two: the sizes of tokens range over ``tokens``, scales of one token over ``groups`` below; rotary parts
    are of size ``rope``, times the token's where they are columns of V as well; ``whole`` multiplies everything."""

    tokens: tuple[int, int]
    groups: int
    rope: int = 0
    whole: int = 0


def tokens(form: formats.Format, sizes: torch.Tensor, spread: Spread, drawn: dict) -> formats.Tokens:
    """Tokens of sizes ``2**sizes [t]``: any code that is not NaN, and float32 scales that are no powers of two. Of e2m1
    codes any, and any scales, whatever the sizes."""
    t, groups = len(sizes), form.coded // form.group

    def e4m3(width):
        codes = torch.randint(254, (t, width), dtype=torch.uint8, **drawn)
        return codes + (codes >= 0x7F)

    if form.codes == "e2m1":
        codes = torch.randint(256, (t, form.code_bytes), dtype=torch.uint8, **drawn)
        return formats.Tokens(codes, e4m3(form.scale_bytes), codes[:, :0])
    codes = e4m3(form.code_bytes)
    # The largest code is nearly 2^9.
    powers = sizes[:, None] + spread.whole - 9 - torch.randint(spread.groups + 1, (t, groups), **drawn)
    if form.scale == "float32":
        scales = torch.exp2(powers.float()) * (1 + torch.rand(t, groups, **drawn))
        scales[torch.rand(t, groups, **drawn) < 0.25] *= -1
        scales = scales.view(torch.uint8)
    else:
        scales = torch.nn.functional.pad((powers + 127).to(torch.uint8), (0, form.scale_bytes - groups))
    rope = torch.randn(t, form.d_qk - form.coded, **drawn) * 2.0 ** (spread.rope + spread.whole)
    if form.coded < 512:
        rope *= torch.exp2(sizes.float())[:, None]
    return formats.Tokens(codes, scales, rope.bfloat16().view(torch.uint8))


def queries(h: int, keys, seen, dtype, power: int, drawn: dict) -> tuple[torch.Tensor, float]:
    """``(q [rows, h, d], softmax_scale)`` to go with ``keys [rows, s, d]``: queries of size ``2**power``, larger where
    all that a row sees is small, and the scale by which the largest scores are ``LARGEST_SCORE``."""
    q = torch.randn(len(keys), h, keys.shape[-1], **drawn) * 2.0**power
    scores = (q.double() @ keys.double().transpose(1, 2)).masked_fill(~seen[:, None], 0)
    largest = scores.abs().amax((1, 2))
    up = torch.log2(largest.max() / largest).floor()
    if dtype == torch.float16:
        # Queries of normal deviation stay below 2^3 of it.
        up = up.clamp(max=12 - power)
    q = q * torch.exp2(up).float()[:, None, None]
    return q.to(dtype), LARGEST_SCORE / float(largest.max())


def check(out, lse, q, keys, seen, scale: float, limits=tolerance.ATTENTION) -> None:
    """Fails unless ``out`` and ``lse`` are the attention of ``q [rows, h, d]`` over ``keys [rows, s, d]``, of which
    each row sees some. An element of out may be off as far as is usual, by the size of the numbers that it averages."""
    keys = keys.double()
    scores = (q.double() * scale) @ keys.transpose(1, 2)
    scores.masked_fill_(~seen[:, None], -torch.inf)
    want_lse = torch.logsumexp(scores, -1)
    weights, values = torch.exp(scores - want_lse[..., None]), keys[..., :512]
    size = ((weights @ values.abs()) / USUAL_MAGNITUDE).clamp(min=LEAST[out.dtype])
    found = tolerance.faults(out.double() / size, lse, weights @ values / size, want_lse, limits)
    assert not found, "\n".join(found)
