"""Everything a call can get wrong: refused by name, before anything is written."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import ferromla
import problems

INVALID, UNSUPPORTED = ferromla.InvalidArgument, ferromla.Unsupported


def _call(device):
    """Arguments of a valid call, as a dict."""
    return _arguments(problems.make(b=3, s_q=2, h=16, lens=[100, 0, 64], device=device))


def _prefill_call(device):
    """The same for a prefill of 7 query tokens."""
    problem = problems.make(h=16, lens=[100, 0, 64], q_lens=[4, 1, 2], device=device)
    return {**_arguments(problem), "qo_indptr": problem.indptr}


def _arguments(problem):
    out, lse = problems.poisoned_outputs(problem.q)
    return {
        "q": problem.q,
        "kv_cache": problem.cache,
        "block_table": problem.table,
        "seq_lens": problem.lens,
        "out": out,
        "lse": lse,
    }


def _wide(tensor):
    """The same shape with a last stride of two."""
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]


# name: (argument in the error, what changes, error)
CASES = {
    "q rank": ("q", lambda c: {"q": c["q"][0]}, INVALID),
    "q width": ("q", lambda c: {"q": c["q"][..., :500]}, INVALID),
    "q dtype": ("q", lambda c: {"q": c["q"].float()}, INVALID),
    "q e4m3": ("q", lambda c: {"q": c["q"].to(torch.float8_e4m3fn)}, UNSUPPORTED),
    "q last stride": ("q", lambda c: {"q": _wide(c["q"])}, INVALID),
    "q no heads": ("q", lambda c: {"q": c["q"][:, :, :0]}, INVALID),
    "q pair of three": ("q", lambda c: {"q": (c["q"], c["q"], c["q"])}, INVALID),
    "q pair first width": ("q[0]", lambda c: {"q": (c["q"][..., :64], c["q"][..., 512:])}, INVALID),
    "q pair second width": ("q[1]", lambda c: {"q": (c["q"][..., :512], c["q"][..., :32])}, INVALID),
    "q pair dtypes": ("q[1]", lambda c: {"q": (c["q"][..., :512], c["q"][..., 512:].half())}, INVALID),
    "q no tensor": ("q", lambda c: {"q": "text"}, INVALID),
    "q None": ("q", lambda c: {"q": None}, INVALID),
    "cache rank": ("kv_cache", lambda c: {"kv_cache": c["kv_cache"][0]}, INVALID),
    "cache width": ("kv_cache", lambda c: {"kv_cache": c["kv_cache"][..., :512]}, INVALID),
    "cache dtype": ("kv_cache", lambda c: {"kv_cache": c["kv_cache"].half()}, INVALID),
    "cache bytes": ("kv_format", lambda c: {"kv_cache": c["kv_cache"].view(torch.uint8)}, INVALID),
    "cache last stride": ("kv_cache", lambda c: {"kv_cache": _wide(c["kv_cache"])}, INVALID),
    "cache empty page": ("kv_cache", lambda c: {"kv_cache": c["kv_cache"][:, :0]}, INVALID),
    "cache heads": ("kv_cache", lambda c: {"kv_cache": torch.stack([c["kv_cache"]] * 3, 2)}, INVALID),
    "table rank": ("block_table", lambda c: {"block_table": c["block_table"][0]}, INVALID),
    "table dtype": ("block_table", lambda c: {"block_table": c["block_table"].long()}, INVALID),
    "table batch": ("block_table", lambda c: {"block_table": c["block_table"][:2]}, INVALID),
    "table last stride": (
        "block_table",
        lambda c: {"block_table": c["block_table"].T.contiguous().T},
        INVALID,
    ),
    "lens rank": ("seq_lens", lambda c: {"seq_lens": c["seq_lens"][None]}, INVALID),
    "lens dtype": ("seq_lens", lambda c: {"seq_lens": c["seq_lens"].long()}, INVALID),
    "lens batch": ("seq_lens", lambda c: {"seq_lens": c["seq_lens"][:2]}, INVALID),
    "lens list": ("seq_lens", lambda c: {"seq_lens": [100, 0, 64]}, INVALID),
    "scale zero": ("softmax_scale", lambda c: {"softmax_scale": 0.0}, INVALID),
    "scale NaN": ("softmax_scale", lambda c: {"softmax_scale": problems.NAN}, INVALID),
    "scale infinite": ("softmax_scale", lambda c: {"softmax_scale": float("inf")}, INVALID),
    "format name": ("kv_format", lambda c: {"kv_format": "int3"}, INVALID),
    "format other": ("kv_format", lambda c: {"kv_format": "fp16"}, INVALID),
    "format quantised": ("kv_format", lambda c: {"kv_format": "fp8"}, INVALID),
    "kv_scale": ("kv_scale", lambda c: {"kv_scale": 1.0}, INVALID),
    "q_scale": ("q_scale", lambda c: {"q_scale": 1.0}, INVALID),
    "sink shape": ("attn_sink", lambda c: {"attn_sink": c["lse"][0, 0, :5]}, INVALID),
    "sink dtype": ("attn_sink", lambda c: {"attn_sink": c["lse"][0, 0].double()}, INVALID),
    "splits zero": ("num_splits", lambda c: {"num_splits": 0}, INVALID),
    "splits negative": ("num_splits", lambda c: {"num_splits": -1}, INVALID),
    "out shape": ("out", lambda c: {"out": c["out"][:, :, :15]}, INVALID),
    "out dtype": ("out", lambda c: {"out": c["out"].half()}, INVALID),
    "out last stride": ("out", lambda c: {"out": _wide(c["out"])}, INVALID),
    "out overlapping": ("out", lambda c: {"out": c["out"][:1].expand(3, 2, 16, 512)}, INVALID),
    "lse shape": ("lse", lambda c: {"lse": c["lse"].transpose(1, 2)}, INVALID),
    "lse dtype": ("lse", lambda c: {"lse": c["lse"].half()}, INVALID),
    "lse overlapping": ("lse", lambda c: {"lse": c["lse"][:1].expand(3, 2, 16)}, INVALID),
    "workspace dtype": (
        "workspace",
        lambda c: {"workspace": torch.empty(1 << 24, device=c["q"].device)},
        INVALID,
    ),
    "workspace small": (
        "workspace",
        lambda c: {"workspace": c["q"].new_empty(8, dtype=torch.uint8)},
        INVALID,
    ),
    "seven dimensions": ("q", lambda c: {"q": c["q"].view(3, 2, 16, 576, 1, 1, 1)}, INVALID),
    "complex": ("q", lambda c: {"q": torch.zeros(3, 2, 16, 576, dtype=torch.complex64)}, INVALID),
}


# What prefill has of its own; the rest is checked by the same code.
PREFILL_CASES = {
    "q rank": ("q", lambda c: {"q": c["q"][None]}, INVALID),
    "q width": ("q", lambda c: {"q": c["q"][..., :500]}, INVALID),
    "q dtype": ("q", lambda c: {"q": c["q"].float()}, INVALID),
    "q no heads": ("q", lambda c: {"q": c["q"][:, :0]}, INVALID),
    "q pair": ("q[1]", lambda c: {"q": (c["q"][..., :512], c["q"][:5, :, 512:])}, INVALID),
    "cache heads": ("kv_cache", lambda c: {"kv_cache": torch.stack([c["kv_cache"]] * 3, 2)}, INVALID),
    "indptr rank": ("qo_indptr", lambda c: {"qo_indptr": c["qo_indptr"][None]}, INVALID),
    "indptr short": ("qo_indptr", lambda c: {"qo_indptr": c["qo_indptr"][:3]}, INVALID),
    "indptr dtype": ("qo_indptr", lambda c: {"qo_indptr": c["qo_indptr"].long()}, INVALID),
    "indptr list": ("qo_indptr", lambda c: {"qo_indptr": [0, 4, 5, 7]}, INVALID),
    "indptr None": ("qo_indptr", lambda c: {"qo_indptr": None}, INVALID),
    "lens batch": ("seq_lens", lambda c: {"seq_lens": c["seq_lens"][:2]}, INVALID),
    "splits": ("num_splits", lambda c: {"num_splits": 0}, INVALID),
    "longest": ("max_q_len", lambda c: {"max_q_len": -1}, INVALID),
    "q_scale": ("q_scale", lambda c: {"q_scale": 1.0}, INVALID),
    "out shape": ("out", lambda c: {"out": c["out"][:6]}, INVALID),
    "out rank": ("out", lambda c: {"out": c["out"][None]}, INVALID),
    "out overlapping": ("out", lambda c: {"out": c["out"][:1].expand(7, 16, 512)}, INVALID),
    "lse shape": ("lse", lambda c: {"lse": c["lse"].T}, INVALID),
    "lse overlapping": ("lse", lambda c: {"lse": c["lse"][:1].expand(7, 16)}, INVALID),
}
OPERATIONS = {
    "decode": (ferromla.decode, _call, CASES),
    "prefill": (ferromla.prefill, _prefill_call, PREFILL_CASES),
}


@pytest.mark.parametrize(
    ("operation", "name"), [(operation, name) for operation, (*_, cases) in OPERATIONS.items() for name in cases]
)
def test_is_refused_by_name_and_nothing_is_written(device, operation, name):
    function, valid, cases = OPERATIONS[operation]
    argument, change, error = cases[name]
    call = valid(device)
    out, lse = call["out"], call["lse"]
    call |= change(call)
    with pytest.raises(error) as caught:
        function(**call)
    assert caught.value.argument == argument
    assert caught.value.value
    assert caught.value.rule
    for part in (argument, caught.value.value, caught.value.rule):
        assert part in str(caught.value)
    assert bool(torch.isnan(out).all())
    assert bool(torch.isnan(lse).all())


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_unchanged_call_is_valid(device, operation):
    function, valid, _ = OPERATIONS[operation]
    out, _ = function(**valid(device))
    assert not torch.isnan(out).any()


def test_exceptions_are_the_standard_ones():
    assert issubclass(INVALID, ValueError)
    assert issubclass(UNSUPPORTED, NotImplementedError)
    assert issubclass(ferromla.CudaError, RuntimeError)


def test_wrong_python_types_are_type_errors():
    with pytest.raises(TypeError):
        ferromla.decode()
    with pytest.raises(TypeError):
        ferromla.decode(**_call("cpu"), plan="text")
    with pytest.raises(TypeError):
        ferromla.decode(**_call("cpu"), softmax_scale="text")


@pytest.mark.gpu
@pytest.mark.parametrize("other", ["cpu", pytest.param("cuda:1", marks=pytest.mark.gpus)])
@pytest.mark.parametrize("argument", ["kv_cache", "block_table", "seq_lens", "out", "lse"])
def test_tensors_on_two_devices_are_refused(cuda, argument, other):
    call = _call(cuda)
    call[argument] = call[argument].to(other)
    with pytest.raises(INVALID, match=other) as caught:
        ferromla.decode(**call)
    assert caught.value.argument == argument
    assert bool(call["out"].isnan().all())


@pytest.mark.gpu
def test_a_qo_indptr_on_another_device_is_refused(cuda):
    call = _prefill_call(cuda)
    lens, indptr = call["seq_lens"], call["qo_indptr"]
    with pytest.raises(INVALID, match="cpu") as caught:
        ferromla.prefill(**call | {"qo_indptr": indptr.cpu()})
    assert caught.value.argument == "qo_indptr"
    shapes = {"num_heads": 16, "page_size": 64, "num_tokens": 7, "device": "cuda:0"}
    for mixed in ({"seq_lens": lens, "qo_indptr": indptr.cpu()}, {"seq_lens": lens.cpu(), "qo_indptr": indptr}):
        with pytest.raises(INVALID, match="as seq_lens is") as caught:
            ferromla.Plan(**mixed, **shapes)
        assert caught.value.argument == "qo_indptr"
    with pytest.raises(INVALID, match="only the device reads") as caught:
        ferromla.Plan(lens, qo_indptr=indptr, num_heads=16, page_size=64)
    assert caught.value.argument == "num_tokens"


@pytest.mark.gpu
@pytest.mark.parametrize("argument", ["q", "kv_cache", "out"])
def test_misaligned_rows_on_cuda_are_refused_with_the_stride_needed(cuda, argument):
    call = _call(cuda)
    tensor = call[argument]
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 4, dtype=tensor.dtype, device=cuda)
    with pytest.raises(INVALID, match="multiple of 8 elements") as caught:
        ferromla.decode(**call | {argument: wide[..., : tensor.shape[-1]]})
    assert caught.value.argument == argument
    flat = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=cuda)[1:].view(tensor.shape)
    with pytest.raises(INVALID, match="16-byte") as caught:
        ferromla.decode(**call | {argument: flat})
    assert caught.value.argument == argument
    ferromla.decode(**call)
    torch.cuda.synchronize()


APPEND_CASES = {
    "kv_c": lambda c: {"kv_c": c["kv_c"][:, :100]},
    "k_pe": lambda c: {"k_pe": None},
    "slots": lambda c: {"slots": c["slots"].int()},
    "kv_cache": lambda c: {"kv_cache": c["kv_cache"][..., :100]},
    "kv_scale": lambda c: {"kv_scale": 1.0},
}


@pytest.mark.parametrize("argument", APPEND_CASES)
def test_append_is_refused_by_name(device, argument):
    call = {
        "kv_c": torch.zeros(3, 512, dtype=torch.bfloat16, device=device),
        "k_pe": torch.zeros(3, 64, dtype=torch.bfloat16, device=device),
        "kv_cache": torch.ones(2, 4, 576, dtype=torch.bfloat16, device=device),
        "slots": torch.zeros(3, dtype=torch.int64, device=device),
    }
    cache = call["kv_cache"]
    with pytest.raises((INVALID, UNSUPPORTED)) as caught:
        ferromla.append_kv(**call | APPEND_CASES[argument](call))
    assert caught.value.argument == argument
    assert bool((cache == 1).all())


PLAN_CASES = {
    "num_heads": {"num_heads": 0},
    "num_kv_heads": {"num_kv_heads": 3},
    "q_len": {"q_len": -1},
    "page_size": {"page_size": 0},
    "max_seq_len": {"max_seq_len": -1},
    "num_splits": {"num_splits": 0},
    "num_sms": {"num_sms": 7},
    "kv_format": {"kv_format": "fp7"},
    "num_kv_heads of a quantised cache": {"num_kv_heads": 2, "kv_format": "fp8_v32"},
    "qo_indptr": {"qo_indptr": torch.zeros(4, dtype=torch.int32)},
    "qo_indptr dtype": {"qo_indptr": torch.zeros(3)},
    "qo_indptr scalar": {"qo_indptr": torch.tensor(3, dtype=torch.int32)},
    "qo_indptr empty": {"qo_indptr": torch.zeros(0, dtype=torch.int32)},
    "qo_indptr end": {"qo_indptr": torch.tensor([0, 4, -1], dtype=torch.int32)},
    "qo_indptr missing": {"num_tokens": 7},
    "num_tokens": {"num_tokens": -1, "qo_indptr": torch.zeros(3, dtype=torch.int32)},
    "q_len beside qo_indptr": {"q_len": 2, "qo_indptr": torch.zeros(3, dtype=torch.int32)},
    "device": {"device": "tpu:0"},
    "seq_lens": {"seq_lens": torch.zeros(2, 3, dtype=torch.int32)},
}


@pytest.mark.parametrize("name", PLAN_CASES)
def test_a_plan_is_refused_by_name(name):
    valid = {"seq_lens": torch.tensor([5, 6]).int(), "num_heads": 16, "page_size": 64}
    with pytest.raises((INVALID, UNSUPPORTED)) as caught:
        ferromla.Plan(**valid | PLAN_CASES[name])
    assert caught.value.argument == name.partition(" ")[0]


def test_an_update_with_the_wrong_qo_indptr_is_refused():
    lens, indptr = torch.tensor([5, 6]).int(), torch.tensor([0, 1, 3]).int()
    uniform = ferromla.Plan(lens, num_heads=16, page_size=64)
    ragged = ferromla.Plan(lens, qo_indptr=indptr, num_heads=16, page_size=64)
    for plan, given in ((uniform, indptr), (ragged, indptr[:2]), (ragged, indptr.long())):
        with pytest.raises(INVALID) as caught:
            plan.update(lens, given)
        assert caught.value.argument == "qo_indptr"
    ragged.update(lens)  # the one that it was made with still counts


def test_checked_mode_names_the_first_offender(device):
    """FERROMLA_CHECK is read once per process, so each try is a process of its own."""
    script = textwrap.dedent(
        """
        import sys
        import ferromla, problems, pytest, torch
        device = torch.device(sys.argv[1])
        problem = problems.make(b=3, h=16, lens=[300, 100, 64], device=device)
        problem.check()
        plan = ferromla.Plan(problem.lens, num_heads=16, page_size=64)
        problem.check(plan=plan)
        for bad in (-1, problem.cache.shape[0]):
            page = problem.table[1, 1].clone()
            problem.table[1, 1] = bad
            with pytest.raises(ferromla.InvalidArgument, match=rf"{bad} at \\[1, 1\\]") as caught:
                problem.run()
            assert caught.value.argument == "block_table"
            problem.table[1, 1] = page
        for bad in (-1, 64 * problem.table.shape[1] + 1):
            problem.lens[2] = bad
            with pytest.raises(ferromla.InvalidArgument, match=rf"{bad} at \\[2\\]") as caught:
                problem.run()
            assert caught.value.argument == "seq_lens"
        problem = problems.make(h=16, lens=[300, 100, 64], q_lens=[2, 0, 5], device=device)
        problem.check()
        plan = ferromla.Plan(problem.lens, num_heads=16, page_size=64, qo_indptr=problem.indptr, num_tokens=7)
        problem.check(plan=plan)
        problem.indptr[3] = 6  # and a token of padding
        problem.run()
        plan.update(problem.lens)
        problem.indptr[3] = 7
        for place, bad in ((0, 1), (1, 3), (2, -1), (3, 8)):
            kept = problem.indptr.clone()
            problem.indptr[place] = bad
            for call in (problem.run, lambda: plan.update(problem.lens)):
                with pytest.raises(ferromla.InvalidArgument) as caught:
                    call()
                assert caught.value.argument == "qo_indptr"
                assert f"at [{place if bad != 3 else 2}]" in caught.value.value
            problem.indptr.copy_(kept)
        rows = torch.zeros(2, 576, dtype=torch.bfloat16, device=device)
        slots = torch.tensor([0, 64 * problem.cache.shape[0]], device=device)
        with pytest.raises(ferromla.InvalidArgument) as caught:
            ferromla.append_kv(rows[:, :512], rows[:, 512:], problem.cache, slots)
        assert caught.value.argument == "slots"
        with pytest.raises(ferromla.InvalidArgument) as caught:
            ferromla.gather_kv(problem.cache, ids=slots)
        assert caught.value.argument == "ids"
        """
    )
    environment = os.environ | {"FERROMLA_CHECK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script, str(device)], env=environment, check=True, timeout=300)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scalars_are_refused_before_outputs_are_made_like_them(dtype: torch.dtype):
    scalar = torch.zeros((), dtype=dtype)
    with pytest.raises(ferromla.InvalidArgument, match=r"out_a is of shape \[\]"):
        ferromla.merge_states(scalar, torch.zeros(()), scalar, torch.zeros(()))


@pytest.mark.parametrize(
    ("output", "other"),
    [("out", "q"), ("out", "kv_cache"), ("lse", "out"), ("lse", "seq_lens"), ("workspace", "kv_cache")],
)
def test_outputs_in_the_memory_of_other_arguments_are_refused(device, output, other):
    call = _call(device)
    like = call.get(output, torch.empty(1 << 25, dtype=torch.uint8))
    memory = torch.zeros(1 << 25, dtype=torch.uint8, device=device)
    for name, tensor in {other: call[other], output: like}.items():
        begin = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        call[name] = begin.copy_(tensor)
    before = memory.clone()
    first, second = (other, output) if other == "out" else (output, other)
    with pytest.raises(INVALID, match=f"in the memory of ({first}|{second})"):
        ferromla.decode(**call)
    assert torch.equal(memory, before)


def test_parts_of_the_same_rows_may_be_input_and_output(device):
    call = _call(device)
    rows = torch.zeros(3, 2, 16, 2 * 576, dtype=torch.bfloat16, device=device)
    q, out = rows[..., :576], rows[..., 576 : 576 + 512]
    q.copy_(call["q"])
    want, _ = ferromla.decode(**call)
    ferromla.decode(**call | {"q": q, "out": out})
    assert torch.equal(out, want)


def test_merged_states_may_be_written_to_an_input_but_not_beside_it(device):
    out = torch.ones(5, 2, 16, 512, dtype=torch.bfloat16, device=device)
    lse = torch.zeros(5, 2, 16, device=device)
    with pytest.raises(INVALID, match="in the memory of out_a") as caught:
        ferromla.merge_states(out[:4], lse[:4], out[:4].clone(), lse[:4].clone(), out=out[1:], lse=lse[:4])
    assert caught.value.argument == "out"
    ferromla.merge_states(out, lse, out.clone(), lse.clone(), out=out, lse=lse)
    assert bool((out == 1).all())


def test_parts_of_a_cache_are_apart(device):
    memory = torch.zeros(2, 4, 576, dtype=torch.bfloat16, device=device)
    rows = torch.ones(3, 512, dtype=torch.bfloat16, device=device)
    slots = torch.arange(3, device=device)
    call = rows, rows[:, :64].contiguous()
    with pytest.raises(INVALID, match=r"in the memory of kv_cache\[1\]"):
        ferromla.append_kv(*call, (memory[..., :512], memory[..., :64]), slots)
    assert bool((memory == 0).all())
    ferromla.append_kv(*call, (memory[..., :512], memory[..., 512:]), slots)
    assert bool((memory[0, :3] == 1).all())


@pytest.mark.gpu
def test_numbers_on_a_gpu_are_refused(cuda):
    """Reading them would wait for the device."""
    call = _call(cuda)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(TypeError, match="must be a number"):
            ferromla.decode(**call, softmax_scale=torch.ones((), dtype=dtype, device=cuda))
    ferromla.decode(**call, softmax_scale=torch.tensor(0.1))


def test_a_number_of_tokens_is_a_number_of_tokens():
    lens, table = torch.tensor([5], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    cache = torch.zeros(1, 64, 576, dtype=torch.bfloat16)
    for count in (-5, 2**31):
        for call in (
            lambda n: ferromla.window_token_ids(lens, lens, table, page_size=64, window=2, num_tokens=n),
            lambda n: ferromla.gather_kv(cache, table, lens, num_tokens=n),
        ):
            with pytest.raises(INVALID, match=f"num_tokens is {count}"):
                call(count)


def test_lengths_of_a_gather_are_checked_before_they_are_counted():
    """Their number is that of the rows to allocate."""

    class Null:
        @property
        def __array_interface__(self):
            return {"shape": (3,), "typestr": "<i4", "data": (0, True), "version": 3}

    pages = torch.zeros(4, 64, 576, dtype=torch.float16).numpy()
    table = torch.zeros(3, 1, dtype=torch.int32).numpy()
    with pytest.raises(INVALID) as caught:
        ferromla.gather_kv(pages, table, Null())
    assert caught.value.argument == "seq_lens"


def test_a_plan_on_the_cpu_serves_one_call_at_a_time():
    """A call beside another one with the same plan is refused or right, never wrong."""
    problem = problems.make(b=2, s_q=2, h=16, lens=[3000, 2000])
    plan = ferromla.Plan(problem.lens, num_heads=16, q_len=2, page_size=64, num_splits=8)
    want = problem.run(plan=plan)

    def call(_):
        try:
            return problem.run(plan=plan)
        except INVALID as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(call, range(100)))
    refused = [got for got in results if isinstance(got, str)]
    assert all("in use by another call" in message for message in refused)
    assert len(refused) < 100
    assert all(torch.equal(a, b) for got in results if got not in refused for a, b in zip(got, want, strict=True))


def test_the_workspace_of_lists():
    plan = ferromla.Plan.sparse(batch=3, num_heads=64, q_len=2, topk=300, extra_topk=20, kv_format="fp8_v32")
    shapes = {"batch": 3, "num_heads": 64, "q_len": 2, "topk": 300, "extra_topk": 20, "kv_format": "fp8_v32"}
    assert ferromla.workspace_bytes(**shapes) == plan.workspace.shape[0]
    assert plan.page_size is None
    tokens = ferromla.Plan.sparse_prefill(num_tokens=9, num_heads=64, topk=300)
    assert ferromla.workspace_bytes(batch=1, num_heads=64, num_tokens=9, topk=300) == tokens.workspace.shape[0]
    for argument, wrong in {
        "page_size": {"page_size": 64, "topk": 5},
        "page_size ": {},
        "extra_topk": {"page_size": 64, "extra_topk": 5},
        "extra_topk ": {"topk": 5, "num_tokens": 5, "extra_topk": 5},
        "batch": {"batch": 2, "topk": 5, "num_tokens": 5},
    }.items():
        with pytest.raises(INVALID) as caught:
            ferromla.workspace_bytes(**{"batch": 1, "num_heads": 16} | wrong)
        assert caught.value.argument == argument.strip()
