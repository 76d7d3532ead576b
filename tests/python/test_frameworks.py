"""Tensors of every framework in, the same kind out."""

from __future__ import annotations

import ctypes
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

import ferromla
import problems
import tolerance


def _to_numpy(tensor):
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _to_torch(array):
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _as(convert, problem):
    return [convert(x) for x in (problem.q, problem.cache, problem.table, problem.lens)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numpy(dtype):
    problem = problems.make(h=16, s_q=2, lens=[100, 0, 70], dtype=dtype)
    q, cache, table, lens = _as(_to_numpy, problem)
    for array in (q, cache, table, lens):
        array.flags.writeable = False
    out, lse = ferromla.decode(q, cache, table, lens)
    assert type(out) is type(lse) is np.ndarray
    assert (out.dtype, lse.dtype) == (q.dtype, np.float32)
    tolerance.check(_to_torch(out), _to_torch(lse), *problem.expected())


def test_numpy_strides_of_parts_of_an_element_are_refused():
    odd = np.ndarray((3,), np.int32, buffer=bytearray(64), strides=(6,))
    problem = problems.make(h=16, lens=[100, 0, 70])
    with pytest.raises(ferromla.InvalidArgument, match=r"seq_lens.*6 bytes"):
        ferromla.decode(problem.q, problem.cache, problem.table, odd)


def test_numpy_of_the_other_byte_order_is_refused():
    problem = problems.make(h=16, lens=[100, 0, 70])
    with pytest.raises(ferromla.InvalidArgument, match="byte order"):
        ferromla.decode(problem.q, problem.cache, problem.table, problem.lens.numpy().astype(">i4"))


def test_read_only_outputs_are_refused():
    problem = problems.make(h=16, lens=[100, 0, 70], dtype=torch.float16)
    q, cache, table, lens = _as(_to_numpy, problem)
    out = np.zeros((3, 1, 16, 512), np.float16)
    out.flags.writeable = False
    with pytest.raises(ferromla.InvalidArgument, match=r"out is a read-only") as caught:
        ferromla.decode(q, cache, table, lens, out=out)
    assert caught.value.argument == "out"


class OnlyProtocol:
    """Speaks DLPack and nothing else; ``old`` is a producer from before DLPack 1.0."""

    def __init__(self, array, old):
        self.array, self.old, self.calls = array, old, []

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        if self.old and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.calls.append(options)
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("old", [False, True])
def test_dlpack_capsules(device, old):
    """Versioned capsules and those from before, with no synchronisation asked of the producer."""
    problem = problems.make(h=16, lens=[100, 0, 70], device=device)
    q, cache, table, lens = _as(lambda tensor: OnlyProtocol(tensor, old), problem)
    out, lse = problems.poisoned_outputs(problem.q)
    # An unknown framework on CUDA brings its workspace as well.
    workspace = torch.empty(1 << 26, dtype=torch.uint8, device=device) if device.type == "cuda" else None
    torch.cuda.synchronize() if device.type == "cuda" else None
    ferromla.decode(q, cache, table, lens, out=out, lse=lse, workspace=workspace)
    tolerance.check(out, lse, *problem.expected())
    for options in (q.calls[-1], lens.calls[-1]):
        assert options.get("max_version") == (None if old else (1, 0))
        assert options.get("stream", -1) == -1
        assert ("stream" in options) == (device.type == "cuda")


def test_an_unknown_framework_must_bring_its_outputs():
    problem = problems.make(h=16, lens=[100, 0, 70])
    inputs = _as(lambda tensor: OnlyProtocol(tensor, False), problem)
    with pytest.raises(ferromla.InvalidArgument, match="OnlyProtocol") as caught:
        ferromla.decode(*inputs)
    assert caught.value.argument == "out"


def test_capsules_are_given_back():
    """Borrowing through DLPack leaves no reference behind."""
    import sys

    array = np.zeros((3,), np.int32)
    before = sys.getrefcount(array)
    problem = problems.make(h=16, lens=[0, 0, 0])
    for _ in range(10):
        problem.lens = OnlyProtocol(array, False)
        ferromla.decode(problem.q, problem.cache, problem.table, problem.lens)
    problem.lens = None
    assert sys.getrefcount(array) == before


class CudaInterfaceOnly:
    def __init__(self, tensor):
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


@pytest.mark.gpu
def test_cuda_array_interface(cuda):
    problem = problems.make(h=16, lens=[100, 0, 70], device=cuda)
    out, lse = problems.poisoned_outputs(problem.q)
    ferromla.decode(
        problem.q,
        problem.cache,
        CudaInterfaceOnly(problem.table),
        CudaInterfaceOnly(problem.lens),
        out=out,
        lse=lse,
    )
    tolerance.check(out, lse, *problem.expected())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cupy(cuda, dtype):
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    problem = problems.make(h=16, s_q=2, lens=[100, 0, 70], dtype=dtype, device=cuda)

    def convert(tensor):
        if tensor.dtype == torch.bfloat16:
            return cupy.from_dlpack(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
        return cupy.from_dlpack(tensor)

    try:
        inputs = _as(convert, problem)
    except (TypeError, ValueError, KeyError):
        assert dtype == torch.bfloat16
        pytest.fail("this cupy has no bfloat16: cover it by the float16 case only")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.wait_event(cupy.cuda.get_current_stream().record())
        out, lse = ferromla.decode(*inputs)
        assert isinstance(out, cupy.ndarray)
        assert isinstance(lse, cupy.ndarray)
        assert out.dtype == inputs[0].dtype
        stream.synchronize()
    raw = torch.from_dlpack(out.view(cupy.int16)).view(dtype)
    tolerance.check(raw, torch.from_dlpack(lse), *problem.expected())


def test_mixed_frameworks_follow_q():
    problem = problems.make(h=16, lens=[100, 0, 70])
    out, lse = ferromla.decode(problem.q, _to_numpy(problem.cache), problem.table.numpy(), problem.lens)
    assert isinstance(out, torch.Tensor)
    tolerance.check(out, lse, *problem.expected())


def test_gradients_are_refused_unless_switched_off():
    problem = problems.make(h=16, lens=[100, 0, 70])
    problem.q.requires_grad_(True)
    with pytest.raises(ferromla.InvalidArgument, match=r"q .*detach") as caught:
        problem.run()
    assert caught.value.argument == "q"
    with torch.no_grad():
        problem.check()
    with torch.inference_mode():
        problem.check()
    problem.q = torch.nn.Parameter(problem.q.detach())
    with pytest.raises(ferromla.InvalidArgument, match="detach"):
        problem.run()
    with torch.no_grad():
        out, _ = ferromla.decode(problem.q, problem.cache, problem.table, problem.lens)
    assert type(out) is torch.Tensor


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_lazily_negated_views_are_refused():
    problem = problems.make(h=16, lens=[100, 0, 70], dtype=torch.float16)
    arguments = (problem.cache, problem.table, problem.lens)
    with pytest.raises(ferromla.InvalidArgument, match=r"q .*resolve_neg"):
        ferromla.decode(torch._neg_view(problem.q), *arguments)
    sink = torch.ones(16, dtype=torch.complex64, device=problem.q.device).conj().imag
    with pytest.raises(ferromla.InvalidArgument, match=r"attn_sink .*resolve_neg"):
        ferromla.decode(problem.q, *arguments, attn_sink=sink)
    # Nothing of another type can be such a view, so nothing else is asked.
    halves = torch.ones(16, dtype=torch.complex32, device=problem.q.device).conj().imag
    assert halves.is_neg()
    for other in (torch.bfloat16, torch.int16):
        with pytest.raises(RuntimeError, match="negative bit"):
            halves.view(other)


def test_fake_tensors_are_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    problem = problems.make(h=16, lens=[100, 0, 70])
    with FakeTensorMode() as mode:
        problem.q = mode.from_tensor(problem.q)
        with pytest.raises(ferromla.InvalidArgument, match="FakeTensor") as caught:
            ferromla.decode(problem.q, problem.cache, problem.table, problem.lens)
    assert caught.value.argument == "q"


def test_sparse_and_meta_tensors_are_refused():
    problem = problems.make(h=16, lens=[100, 0, 70])
    for lens in (problem.lens.to_sparse(), problem.lens.to("meta")):
        with pytest.raises(ferromla.InvalidArgument) as caught:
            ferromla.decode(problem.q, problem.cache, problem.table, lens)
        assert caught.value.argument == "seq_lens"


def test_a_storage_offset_is_respected():
    problem = problems.make(h=16, lens=[100, 0, 70])
    whole = torch.full((problem.q.numel() + 24,), problems.NAN, dtype=problem.q.dtype)
    view = whole[24:].view(problem.q.shape)
    view.copy_(problem.q)
    problem.q = view
    problem.check()


def test_memory_that_ends_at_a_page_boundary_is_not_read_past():
    """The inputs lie against the end of their mapping: a read beyond it would crash the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    problem = problems.make(h=16, s_q=2, lens=[100, 0, 70], page_size=61, dtype=torch.float16)
    page = 4096

    def at_the_edge(tensor):
        size = tensor.numel() * tensor.element_size()
        pages = -(-size // page)
        base = libc.mmap(None, ctypes.c_size_t((pages + 1) * page), 3, 0x22, -1, ctypes.c_size_t(0))
        assert base not in (None, ctypes.c_void_p(-1).value)
        assert libc.mprotect(ctypes.c_void_p(base + pages * page), ctypes.c_size_t(page), 0) == 0
        memory = (ctypes.c_char * size).from_address(base + pages * page - size)
        array = np.frombuffer(memory, _to_numpy(tensor).dtype).reshape(tensor.shape)
        array[...] = _to_numpy(tensor)
        return array

    out, lse = ferromla.decode(*_as(at_the_edge, problem))
    tolerance.check(_to_torch(out), _to_torch(lse), *problem.expected())


def test_bfloat16_without_ml_dtypes_is_refused_by_name(monkeypatch):
    cache = ferromla.empty_kv_cache(2, 4, "fp16", framework="numpy")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ferromla.Unsupported, match="ml_dtypes") as caught:
        ferromla.gather_kv(cache, ids=np.array([0, 1]))
    assert caught.value.argument == "out"
    with pytest.raises(ferromla.Unsupported, match="ml_dtypes") as caught:
        ferromla.empty_kv_cache(2, 4, "bf16", framework="numpy")
    assert caught.value.argument == "kv_format"
