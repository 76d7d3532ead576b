"""Allocation of caches in the caller's framework."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ferromla._ferromla import InvalidArgument, Unsupported, cache_shape


def empty_kv_cache(
    num_pages: int,
    page_size: int,
    kv_format: str,
    device: Any = "cpu",
    *,
    d_qk: int = 576,
    framework: str | None = None,
) -> Any:
    """Allocate an uninitialised paged cache of the right shape, dtype and strides.

    Args:
        num_pages: pages.
        page_size: tokens of a page.
        kv_format: ``"bf16"`` or ``"fp16"``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:0"`` or such a ``torch.device``.
        d_qk: width of a row, 576 (512 latent, then 64 rotary) or 512.
        framework: ``"torch"``, ``"numpy"`` or ``"cupy"``; None for torch where it is installed, else cupy on
            a CUDA device and numpy on the CPU.

    Returns:
        ``[num_pages, page_size, d_qk]``, contiguous. numpy and cupy hold bfloat16 as ``ml_dtypes.bfloat16``.

    Raises:
        InvalidArgument, Unsupported: names the argument, its value and what is allowed.

    Example:
        >>> import ferromla
        >>> cache = ferromla.empty_kv_cache(8, 64, "bf16", "cpu", framework="numpy")
        >>> cache.shape, cache.dtype.name
        ((8, 64, 576), 'bfloat16')
    """
    shape, dtype, name = cache_shape(num_pages, page_size, kv_format, d_qk, device)
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
    if name != "bfloat16":
        return name
    try:
        return importlib.import_module("ml_dtypes").bfloat16
    except ModuleNotFoundError as missing:
        rule = "numpy and cupy hold bfloat16 with the package ml_dtypes, which is not installed"
        raise _error(Unsupported, "kv_format", "'bf16'", rule) from missing


def _refused(framework: str, device: str) -> InvalidArgument:
    rule = 'must be "torch", "numpy" on the CPU or "cupy" on a CUDA device'
    return _error(InvalidArgument, "framework", f"{framework!r} on {device!r}", rule)


def _error(kind: Any, argument: str, value: str, rule: str) -> Any:
    """An error as the compiled module makes them: what is wrong, and its parts as attributes."""
    error = kind(f"{argument} is {value}: {rule}")
    error.argument, error.value, error.rule = argument, value, rule
    return error
