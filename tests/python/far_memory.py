"""Pages of a cache that lie gigabytes apart: addresses of CUDA's virtual memory, with memory only where pages are."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

GRANULE = 2 << 20


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _Tensor:
    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "strides": strides,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _call(name: str, *arguments) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    assert status == 0, f"{name}: {status}"


@contextlib.contextmanager
def apart(cache: torch.Tensor, reach: int) -> Iterator[torch.Tensor]:
    """A copy of a cache of bytes whose first page and last one begin ``reach`` bytes apart, or a little more."""
    pages, size = len(cache), cache[0].nbytes
    assert cache.dtype == torch.uint8, "bytes"
    assert cache[0].is_contiguous()
    assert size <= GRANULE
    stride = -(-reach // (pages - 1) // GRANULE) * GRANULE
    here = _Location(1, cache.device.index)  # a device
    properties, access = _Properties(1, 0, here), _Access(here, 3)  # pinned; read and write
    granule, size_t = ctypes.c_size_t(GRANULE), ctypes.c_size_t
    first, span = ctypes.c_uint64(), size_t(stride * (pages - 1) + GRANULE)
    _call("cuMemAddressReserve", ctypes.byref(first), span, size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
    mapped = []
    try:
        for page in range(pages):
            at, handle = ctypes.c_uint64(first.value + page * stride), ctypes.c_uint64()
            _call("cuMemCreate", ctypes.byref(handle), granule, ctypes.byref(properties), ctypes.c_uint64(0))
            _call("cuMemMap", at, granule, size_t(0), handle, ctypes.c_uint64(0))
            _call("cuMemRelease", handle)  # when it is mapped no more
            mapped.append(at)
            _call("cuMemSetAccess", at, granule, ctypes.byref(access), size_t(1))
        far = torch.as_tensor(
            _Tensor(first.value, tuple(cache.shape), (stride, *cache.stride()[1:])), device=cache.device
        )
        for page in range(pages):
            far[page].copy_(cache[page])
        yield far
    finally:
        torch.cuda.synchronize(cache.device)
        for at in mapped:
            _call("cuMemUnmap", at, granule)
        _call("cuMemAddressFree", first, span)
