"""ferromla on the emulated GPU (tests/emulator): its functions over torch tensors of the CPU.

``install()`` replaces the package's functions in this process by ones that hand CPU tensors over as tensors of CUDA
device 0, whose kernels run on the same memory.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib

import torch

import ferromla

LIBRARY = pathlib.Path(__file__).resolve().parents[2] / "build/emulator/libcuda.so"
DEVICE_CUDA, DEVICE_CPU = 2, 1
FUNCTIONS = tuple(name for name in ferromla.__all__ if callable(getattr(ferromla, name)) and name.islower())


class _Capsule(ctypes.Structure):
    """The beginning of DLPack's DLManagedTensorVersioned, as far as the tensor's device."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
    )


class DeviceTensor(torch.Tensor):
    """A CPU tensor that says it is on CUDA device 0."""

    __dlpack_c_exchange_api__ = None

    def __dlpack_device__(self) -> tuple[int, int]:
        """As DLPack counts devices."""
        return DEVICE_CUDA, 0

    def __dlpack__(self, **_: object) -> object:
        """The CPU tensor's capsule with the other device."""
        capsule = self.as_subclass(torch.Tensor).__dlpack__(max_version=(1, 0))
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        held = _Capsule.from_address(pointer(capsule, b"dltensor_versioned"))
        assert held.device_type == DEVICE_CPU
        held.device_type = DEVICE_CUDA
        return capsule


class _Loan:
    """CPU tensors of one call as the emulated device's, and back: what was lent comes back as itself."""

    def __init__(self) -> None:
        self.lent: dict[int, torch.Tensor] = {}

    def over(self, value: object) -> object:
        """To the device."""
        if isinstance(value, (tuple, list)):
            return tuple(self.over(part) for part in value)
        if isinstance(value, Plan):
            return value.plan
        if isinstance(value, torch.device):
            return "cuda:0"
        if type(value) is not torch.Tensor:
            return value
        device_tensor = value.as_subclass(DeviceTensor)
        self.lent[id(device_tensor)] = value
        return device_tensor

    def back(self, value: object) -> object:
        """And back."""
        if isinstance(value, (tuple, list)):
            return tuple(self.back(part) for part in value)
        if not isinstance(value, DeviceTensor):
            return value
        return self.lent.get(id(value), value.as_subclass(torch.Tensor))


def _handing_over(function):
    @functools.wraps(function)
    def call(*args, **options):
        loan = _Loan()
        args, options = [loan.over(x) for x in args], {name: loan.over(x) for name, x in options.items()}
        return loan.back(function(*args, **options))

    return call


class Plan:
    """As ferromla.Plan."""

    made_by = ferromla.Plan

    def __init__(self, *args: object, **options: object) -> None:
        self.plan = _handing_over(self.made_by)(*args, **options)

    @classmethod
    def sparse(cls, *args: object, **options: object) -> Plan:
        """As ferromla.Plan.sparse."""
        return cls._holding(_handing_over(cls.made_by.sparse)(*args, **options))

    @classmethod
    def sparse_prefill(cls, *args: object, **options: object) -> Plan:
        """As ferromla.Plan.sparse_prefill."""
        return cls._holding(_handing_over(cls.made_by.sparse_prefill)(*args, **options))

    @classmethod
    def _holding(cls, plan: object) -> Plan:
        made = cls.__new__(cls)
        made.plan = plan
        return made

    def __getattr__(self, name: str) -> object:
        found = getattr(self.plan, name)
        return _handing_over(found) if callable(found) else found


# Of memory from CUDA.
ALIGNMENT = 256


def _empty(torchs, *args: object, device: object = None, **options: object) -> torch.Tensor:
    """As torch.empty, which the package calls for a plan's memory."""
    if str(device).startswith("cuda"):
        wanted = torchs(*args, device="meta", **options)
        room = torchs(wanted.nbytes + ALIGNMENT, dtype=torch.uint8)
        begin = -room.data_ptr() % ALIGNMENT
        aligned = room[begin : begin + wanted.nbytes].view(wanted.dtype).view(wanted.shape)
        return aligned.as_subclass(DeviceTensor)
    return torchs(*args, device=device, **options)


def install() -> None:
    """Loads the emulated driver, which then is the process's libcuda, and replaces the package's functions."""
    if not LIBRARY.exists():
        raise SystemExit(f"{LIBRARY} is not there: make emulator")
    ctypes.CDLL(str(LIBRARY), ctypes.RTLD_GLOBAL)
    torch._C._cuda_getCurrentRawStream = lambda _ordinal: 0
    torch.empty = functools.partial(_empty, torch.empty)
    for name in FUNCTIONS:
        setattr(ferromla, name, _handing_over(getattr(ferromla, name)))
    ferromla.Plan = Plan


def is_installed() -> bool:
    """Whether this process's GPU is the emulated one."""
    return ferromla.Plan is Plan


def launches() -> int:
    """How many kernels this process has run on it."""
    count = ctypes.CDLL(str(LIBRARY)).emulated_launches
    count.restype = ctypes.c_uint64
    return count()
