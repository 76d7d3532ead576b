"""The quantised cache formats by their byte layouts, with torch's own conversions: it shares nothing with the library.

A row of bytes is, in ``FORMATS``' terms: codes, the scales of their groups, the other numbers in bfloat16. In split
pages the scales of all tokens come after their rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
UE8M0 = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [torch.nan], dtype=torch.float32)
LEAST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Format:
    """What a token's bytes are; ``group`` numbers share a scale, 0: the tensor has one."""

    name: str
    d_qk: int
    coded: int
    group: int
    scale: str | None
    scale_bytes: int
    codes: str = "e4m3"
    split: bool = False

    @property
    def code_bytes(self) -> int:
        return self.coded if self.codes == "e4m3" else self.coded // 2

    @property
    def rope_bytes(self) -> int:
        return 2 * (self.d_qk - self.coded)

    @property
    def bytes(self) -> int:
        return self.code_bytes + self.scale_bytes + self.rope_bytes


FORMATS = (
    Format("fp8", 576, 576, 0, None, 0),
    Format("fp8", 512, 512, 0, None, 0),
    Format("fp8_v32", 576, 512, 128, "float32", 16),
    Format("fp8_v4", 512, 448, 64, "ue8m0", 8, split=True),
    Format("fp8_v41", 512, 512, 32, "ue8m0", 16),
    Format("fp8_v41_split", 512, 512, 32, "ue8m0", 16, split=True),
    Format("fp4_v41", 512, 512, 16, "e4m3", 32, codes="e2m1"),
)


@dataclass
class Tokens:
    """The bytes of ``t`` tokens: ``[t, code_bytes]``, ``[t, scale_bytes]`` and ``[t, rope_bytes]`` uint8."""

    codes: torch.Tensor
    scales: torch.Tensor
    rope: torch.Tensor

    def __getitem__(self, index) -> Tokens:
        return Tokens(self.codes[index], self.scales[index], self.rope[index])


def _views(cache: torch.Tensor, form: Format) -> Tokens:
    """The parts of every token of a cache ``[n, P, bytes]``, as views ``[n, P, ...]`` of it."""
    cache = cache.view(torch.uint8)
    n, p, width = cache.shape
    assert width == form.bytes
    first, second = form.code_bytes, form.code_bytes + form.scale_bytes
    if not form.split:
        return Tokens(cache[..., :first], cache[..., first:second], cache[..., second:])
    row = form.code_bytes + form.rope_bytes
    strides, start = cache.stride(0), cache.storage_offset()
    rows = cache.as_strided((n, p, row), (strides, row, 1), start)
    scales = (n, p, form.scale_bytes), (strides, form.scale_bytes, 1), start + p * row
    return Tokens(rows[..., :first], cache.as_strided(*scales), rows[..., first:])


def read(cache: torch.Tensor, form: Format) -> Tokens:
    """All tokens of a cache, copied, in the order of their slots."""
    views = _views(cache, form)
    return Tokens(*(part.flatten(0, 1) for part in (views.codes, views.scales, views.rope)))


def write(cache: torch.Tensor, form: Format, slots: torch.Tensor, tokens: Tokens) -> None:
    """Puts tokens into slots of a cache."""
    views = _views(cache, form)
    page, offset = slots // cache.shape[1], slots % cache.shape[1]
    views.codes[page, offset] = tokens.codes
    views.scales[page, offset] = tokens.scales
    views.rope[page, offset] = tokens.rope


def dequantise(tokens: Tokens, form: Format, kv_scale: float = 1.0) -> torch.Tensor:
    """The numbers ``[t, d_qk]`` of tokens, float32."""
    if form.codes == "e4m3":
        numbers = tokens.codes.view(torch.float8_e4m3fn).float()
    else:
        pairs = torch.stack([tokens.codes & 15, tokens.codes >> 4], -1).flatten(1)
        numbers = E2M1.to(pairs.device)[pairs.long()]
    if form.scale is None:
        scales = torch.tensor([[kv_scale]], dtype=torch.float32, device=numbers.device)
    elif form.scale == "float32":
        scales = tokens.scales.contiguous().view(torch.float32)
    elif form.scale == "ue8m0":
        used = tokens.scales[:, : form.coded // form.group]
        scales = UE8M0.to(used.device)[used.long()]
    else:
        scales = tokens.scales.view(torch.float8_e4m3fn).float()
    numbers = (numbers.unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)
    if not form.rope_bytes:
        return numbers
    return torch.cat([numbers, tokens.rope.contiguous().view(torch.bfloat16).float()], 1)


def quantise(rows: torch.Tensor, form: Format, *, kv_scale: float = 1.0, round_scale: bool = True) -> Tokens:
    """The tokens of ``rows [t, d_qk]``: bfloat16, float16 or float32. Computed on the CPU: on a GPU torch divides by a
    number as it multiplies by its inverse, and NaN loses its sign."""
    device, rows = rows.device, rows.cpu()
    rope = rows[:, form.coded :].to(torch.bfloat16).contiguous().view(torch.uint8)
    numbers = rows[:, : form.coded].float()
    t = len(rows)
    if form.scale is None:
        scales, scale_bytes = torch.full((t, 1), kv_scale), torch.empty(t, 0, dtype=torch.uint8)
    else:
        grouped = numbers.unflatten(1, (-1, form.group)).abs()
        largest = torch.where(grouped.isnan(), 0, grouped).amax(-1).clamp(max=torch.finfo(torch.float32).max)
        scales, scale_bytes = _scales(largest, form, round_scale)
    quotients = (numbers.unflatten(1, (scales.shape[1], -1)) / scales[..., None]).flatten(1)
    if form.codes == "e4m3":
        codes = quotients.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = _e2m1(quotients)
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return Tokens(codes.to(device), scale_bytes.to(device), rope.to(device))


def _scales(largest, form, round_scale):
    """Scales and their bytes."""
    if form.scale == "e4m3":
        codes = (largest / 6).clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8).clamp(min=1)
        return codes.view(torch.float8_e4m3fn).float(), codes
    scales = (largest / 448).clamp(min=LEAST_NORMAL)
    if form.scale == "ue8m0" or round_scale:
        mantissa, exponent = torch.frexp(scales.double())
        scales = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int()).float()
    if form.scale == "float32":
        return scales, scales.view(torch.uint8)
    exponents = torch.frexp(scales)[1] - 1 + 127
    padding = form.scale_bytes - exponents.shape[1]
    return scales, torch.nn.functional.pad(exponents.to(torch.uint8), (0, padding))


def _e2m1(x):
    """The nearest codes: how many middles between neighbouring numbers lie below, ties to even codes."""
    magnitude = torch.where(x.isnan(), 0, x.abs())
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for code, middle in enumerate((E2M1[1:8] + E2M1[:7]) / 2, start=1):
        codes += (magnitude >= middle if code % 2 == 0 else magnitude > middle).to(torch.uint8)
    return codes | x.signbit().to(torch.uint8) << 3
