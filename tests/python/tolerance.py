"""How near a result must be to the float64 reference."""

from __future__ import annotations

import torch

OUT_ABSOLUTE, OUT_RELATIVE, OUT_ANGLE = 8e-4, 2.01 / 128, 5e-6
LSE_ABSOLUTE, LSE_RELATIVE = 1e-6, 8.01 / 65536


def faults(out, lse, want_out, want_lse) -> list[str]:
    """What is wrong with a result, in words; empty when it is right."""
    found = []
    out, lse = out.to(want_out.device).double(), lse.to(want_lse.device).double()
    bad = ~_near(out, want_out, OUT_ABSOLUTE, OUT_RELATIVE)
    if bad.any():
        found.append(_describe("out", bad, out, want_out))
    if (angle := float(angle_error(out, want_out))) > OUT_ANGLE or angle != angle:
        found.append(f"out: 1 - 2<x,y>/(|x|^2+|y|^2) is {angle:.2e}, above {OUT_ANGLE:.0e}")
    bad = ~_near(lse, want_lse, LSE_ABSOLUTE, LSE_RELATIVE)
    if bad.any():
        found.append(_describe("lse", bad, lse, want_lse))
    return found


def all_near(out, lse, want_out, want_lse) -> torch.Tensor:
    """Whether a result is right, as one bool on its device: nothing is waited for."""
    out, lse = out.double(), lse.double()
    near = _near(out, want_out, OUT_ABSOLUTE, OUT_RELATIVE).all()
    near &= _near(lse, want_lse, LSE_ABSOLUTE, LSE_RELATIVE).all()
    return near & (angle_error(out, want_out) <= OUT_ANGLE)


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
