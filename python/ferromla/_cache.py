"""Allocation of caches in the caller's framework."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ferromla._errors import error
from ferromla._ferromla import InvalidArgument, Unsupported, cache_shape


def empty_kv_cache(
    num_pages: int,
    page_size: int,
    kv_format: str,
    device: Any = "cpu",
    *,
    d_qk: int | None = None,
    framework: str | None = None,
) -> Any:
    """Allocate an uninitialised paged cache of the right shape, dtype and strides.

    Args:
        num_pages: pages.
        page_size: tokens of a page.
        kv_format: ``"bf16"``, ``"fp16"``, ``"fp8"``, ``"fp8_v32"``, ``"fp8_v4"``, ``"fp8_v41"``,
            ``"fp8_v41_split"`` or ``"fp4_v41"``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:0"`` or such a ``torch.device``.
        d_qk: width of a row, 576 (512 latent, then 64 rotary) or 512; None for 576 where the format can have it.
        framework: ``"torch"``, ``"numpy"`` or ``"cupy"``; None for torch where it is installed, else cupy on
            a CUDA device and numpy on the CPU.

    Returns:
        ``[num_pages, page_size, d_qk]``, contiguous; of the formats with scales in the cache
        ``[num_pages, page_size, bytes]`` uint8. Pages of ``"fp8_v4"`` begin on multiples of 576 bytes, those of
        ``"fp8_v41_split"`` of 512; all else is contiguous. numpy and cupy hold bfloat16 and float8_e4m3fn
        (``"fp8"``) as the types of ``ml_dtypes``.

    Raises:
        InvalidArgument, Unsupported: names the argument, its value and what is allowed.

    Example:
        >>> import ferromla
        >>> cache = ferromla.empty_kv_cache(8, 64, "bf16", "cpu", framework="numpy")
        >>> cache.shape, cache.dtype.name
        ((8, 64, 576), 'bfloat16')
    """
    shape, strides, dtype, name = cache_shape(num_pages, page_size, kv_format, d_qk, device)
    pages = _empty((num_pages, strides[0]), dtype, name, device, framework)
    # A view: the tokens of a page are divided, what pads it is left out.
    return pages[:, : shape[1] * shape[2]].reshape(shape)


def _empty(shape: tuple[int, int], dtype: str, name: str, device: Any, framework: str | None) -> Any:
    on_cpu = name == "cpu"
    if framework is None:
        has_torch = importlib.util.find_spec("torch") is not None
        framework = "torch" if has_torch else ("numpy" if on_cpu else "cupy")
    if framework == "torch":
        torch = importlib.import_module("torch")
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    if framework == "numpy" and on_cpu:
        return importlib.import_module("numpy").empty(shape, _numpy_dtype(dtype))
    if framework == "cupy" and not on_cpu:
        cupy = importlib.import_module("cupy")
        with cupy.cuda.Device(int(name.partition(":")[2])):
            return cupy.empty(shape, _numpy_dtype(dtype))
    raise _refused(framework, name)


def _numpy_dtype(name: str) -> Any:
    if name not in ("bfloat16", "float8_e4m3fn"):
        return name
    try:
        return getattr(importlib.import_module("ml_dtypes"), name)
    except ModuleNotFoundError as missing:
        rule = f"numpy and cupy hold {name} with the package ml_dtypes, which is not installed"
        raise error(Unsupported, "kv_format", repr(name), rule) from missing


def _refused(framework: str, device: str) -> InvalidArgument:
    rule = 'must be "torch", "numpy" on the CPU or "cupy" on a CUDA device'
    return error(InvalidArgument, "framework", f"{framework!r} on {device!r}", rule)
