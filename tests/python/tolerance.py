"""How near a result must be to the float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

OUT_ABSOLUTE, LSE_ABSOLUTE = 8e-4, 1e-6


@dataclass(frozen=True)
class Limits:
    """The relative errors that an operation may have, and the angle between its result and the reference."""

    out: float
    angle: float
    lse: float


ATTENTION = Limits(2.01 / 128, 5e-6, 8.01 / 65536)
SPARSE_PREFILL = Limits(3.01 / 128, 7e-6, 2.01 / 65536)


def faults(out, lse, want_out, want_lse, limits=ATTENTION) -> list[str]:
    """What is wrong with a result, in words; empty when it is right. Waits for the device once where nothing is."""
    out, lse = out.to(want_out.device), lse.to(want_lse.device)
    if all_near(out, lse, want_out, want_lse, limits):
        return []
    found = []
    allowed = float(_allowed_angle(want_out, out.dtype, limits))
    out = out.double()
    bad = ~_near(out, want_out, OUT_ABSOLUTE, limits.out)
    if bad.any():
        found.append(_describe("out", bad, out, want_out))
    if (angle := float(angle_error(out, want_out))) > allowed or angle != angle:
        found.append(f"out: 1 - 2<x,y>/(|x|^2+|y|^2) is {angle:.2e}, above {allowed:.0e}")
    return found + row_faults("lse", lse, want_lse, limits)


def row_faults(name, values, want, limits=ATTENTION) -> list[str]:
    """The same of one number per row: ``lse`` or ``max_logits``."""
    values = values.to(want.device).double()
    bad = ~_near(values, want, LSE_ABSOLUTE, limits.lse)
    return [_describe(name, bad, values, want)] if bad.any() else []


def all_near(out, lse, want_out, want_lse, limits=ATTENTION) -> torch.Tensor:
    """Whether a result is right, as one bool on its device: nothing is waited for."""
    allowed = _allowed_angle(want_out, out.dtype, limits)
    out, lse = out.double(), lse.double()
    near = _near(out, want_out, OUT_ABSOLUTE, limits.out).all()
    near &= _near(lse, want_lse, LSE_ABSOLUTE, limits.lse).all()
    return near & (angle_error(out, want_out) <= allowed)


def _allowed_angle(want, dtype: torch.dtype, limits: Limits) -> torch.Tensor:
    """The limit; twice what rounding the reference to the result's type makes of it where that is more. It never is
    where numbers have all their bits: 2^-9 of each is an angle of 2e-6. fp16 below 6e-5, which a sink can make of a
    result, has fewer."""
    return (2 * angle_error(want.to(dtype).double(), want)).clamp(min=limits.angle)


def prefill_near(out, max_logits, lse, want_out, want_max, want_lse) -> torch.Tensor:
    """``all_near`` of sparse_prefill."""
    near = all_near(out, lse, want_out, want_lse, SPARSE_PREFILL)
    return near & _near(max_logits.double(), want_max, LSE_ABSOLUTE, SPARSE_PREFILL.lse).all()


def prefill_faults(out, max_logits, lse, want_out, want_max, want_lse) -> list[str]:
    """``faults`` of sparse_prefill."""
    found = faults(out, lse, want_out, want_lse, SPARSE_PREFILL)
    return found + row_faults("max_logits", max_logits, want_max, SPARSE_PREFILL)


Compared = tuple[str, torch.Tensor, Callable[[], list[str]]]


def check_cases(cases: Callable[[], Iterable[Compared]]) -> int:
    """Fails with what is wrong in which cases, if anything; gives their number. ``cases()`` compares one after another
    and gives the name of each, whether it is right, as ``all_near`` does, and the words for when it is not. Nothing is
    waited for before the last: those that are not right are gone through again for their words."""
    names, near = [], []
    for name, right, _ in cases():
        names.append(name)
        near.append(right)
    off = [index for index, right in enumerate(torch.stack(near).tolist()) if not right]
    found = []
    for index, (name, _, words) in enumerate(cases() if off else ()):
        if index in off:
            found.append(f"{name}: {'; '.join(words()) or 'right when computed again'}")
        if len(found) == 20:
            break
    assert not off, f"{len(off)} of {len(names)} cases:\n" + "\n".join(found)
    return len(names)


def check(out, lse, want_out, want_lse) -> None:
    """Fail with what is wrong, if anything."""
    found = faults(out, lse, want_out, want_lse)
    assert not found, "\n".join(found)


def angle_error(x, y) -> torch.Tensor:
    """1 - 2<x,y>/(|x|^2 + |y|^2); 0 for two zeros."""
    total = (x * x).sum() + (y * y).sum()
    return torch.where(total == 0, torch.zeros_like(total), 1 - 2 * (x * y).sum() / total)


def _near(x, want, absolute, relative):
    """Element by element. NaN is near nothing, an infinity only near itself."""
    error = (x - want).abs()
    return (x == want) | (error <= absolute) | ((error <= relative * want.abs()) & torch.isfinite(want))


def _describe(name, bad, x, want) -> str:
    first = tuple(int(i) for i in bad.nonzero()[0])
    return f"{name}: {int(bad.sum())} of {bad.numel()} off; at {first} {float(x[first])!r}, not {float(want[first])!r}"
