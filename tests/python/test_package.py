"""The package around the operations: examples, stubs, operators, command line, import time."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import json
import pathlib
import subprocess
import sys

import pytest
import torch

import ferromla
import ferromla.torch_ops
import problems
import problems_sparse
import tolerance
from ferromla.compat import flash_mla, flashinfer

README = pathlib.Path(__file__).parents[2] / "README.md"
PACKAGE = pathlib.Path(ferromla.__file__).parent


def _documented():
    """Every public object with its docstring, methods included."""
    for name in ferromla.__all__:
        if name == "__version__":
            continue
        value = getattr(ferromla, name)
        yield name, value
        if name == "Plan":
            yield from ((f"Plan.{key}", getattr(value, key)) for key in vars(value) if not key.startswith("_"))
    yield "torch_ops", ferromla.torch_ops
    for module in (flash_mla, flashinfer):
        name = module.__name__.removeprefix("ferromla.")
        yield name, module
        yield from ((f"{name}.{key}", getattr(module, key)) for key in module.__all__)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper
    yield from ((f"{wrapper.__name__}.{key}", value) for key, value in vars(wrapper).items() if not key.startswith("_"))


# Sorted: the members of a class have another order in every process, and pytest-xdist wants the same.
DOCUMENTED = dict(sorted(_documented()))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples_in_docstrings_run(name):
    value = DOCUMENTED[name]
    assert value.__doc__, f"{name} has no docstring"
    examples = doctest.DocTestParser().get_doctest(value.__doc__, {}, name, None, None)
    if inspect.ismodule(value) or inspect.isroutine(value):
        assert examples.examples, f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    lines = []
    runner.run(examples, out=lines.append)
    assert runner.failures == 0, "".join(lines)


def test_the_examples_of_the_readme_run():
    failures, examples = doctest.testfile(str(README), module_relative=False)
    assert examples > 5
    assert failures == 0


def test_the_stubs_say_what_the_module_has():
    """Names, parameters, their kinds and defaults agree, both ways."""
    module = importlib.import_module("ferromla._ferromla")
    tree = ast.parse((PACKAGE / "_ferromla.pyi").read_text())
    functions = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(_stub_parameters(node))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    aids = {"SupportedOperation", "Support"}
    public = {name for name in vars(module) if not name.startswith("__")}
    assert public == functions.keys() | (classes.keys() - aids)
    for name, overloads in functions.items():
        assert _of_overloads(overloads) == _parameters(getattr(module, name)), name
    methods = {node.name: node for node in classes["Plan"].body if isinstance(node, ast.FunctionDef)}
    assert _stub_parameters(methods.pop("__new__"))[1:] == _parameters(module.Plan)
    assert methods.keys() == {key for key in vars(module.Plan) if not key.startswith("_")}
    for name, node in methods.items():
        if inspect.isroutine(getattr(module.Plan, name)):
            assert _stub_parameters(node) == _parameters(getattr(module.Plan, name)), name


def _stub_parameters(node):
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    pairs = list(zip(positional, defaults, ["positional"] * len(positional), strict=True))
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, ["keyword"] * len(arguments.kwonlyargs), strict=True)
    return [
        (argument.arg, ast.literal_eval(default) if default else inspect.Parameter.empty, kind)
        for argument, default, kind in pairs
    ]


def _of_overloads(overloads):
    """The parameters of a function: one has a default if an overload gives it one."""
    merged = []
    for same in zip(*overloads, strict=True):
        assert len({(name, kind) for name, _, kind in same}) == 1, same
        merged.append(next((x for x in same if x[1] is not inspect.Parameter.empty), same[0]))
    return merged


def _parameters(function):
    return [
        (
            parameter.name,
            parameter.default,
            "keyword" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else "positional",
        )
        for parameter in inspect.signature(function).parameters.values()
    ]


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def _python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, timeout=120).stdout


def test_import_is_quick_and_leaves_torch_alone():
    script = (
        "import sys, time; start = time.perf_counter(); import ferromla; "
        "print(time.perf_counter() - start, 'torch' in sys.modules)"
    )
    seconds, torch_loaded = min(_python("-c", script).split() for _ in range(3))
    assert float(seconds) < 0.1
    assert torch_loaded == "False"


def test_support_is_plain_data():
    report = ferromla.support()
    assert json.loads(json.dumps(report)) == report
    assert report["backend"] in ("cuda", "cpu")
    assert {row["operation"] for row in report["operations"]} == {
        "decode",
        "prefill",
        "merge_states",
        "append_kv",
        "gather_kv",
        "quantize_kv",
        "dequantize_kv",
        "sparse_decode",
        "sparse_prefill",
        "to_physical",
        "window_token_ids",
        "combine_topk_window",
    }
    beside = {
        row["kv_format"]: set(row["extra_kv_formats"])
        for row in report["operations"]
        if row["operation"] == "sparse_decode"
    }
    assert beside["fp16"] == {"fp16"}
    assert beside["fp8_v32"] == {"bf16", "fp8", "fp8_v32"}
    assert "fp4_v41" in beside["fp8_v41"]
    assert "fp8_v32" not in beside["fp8_v41"]
    assert ferromla.support("cpu")["backend"] == "cpu"
    assert ferromla.support("cuda:77")["backend"] == "none"
    assert ferromla.support("cuda:77")["reason"]


@pytest.mark.gpu
def test_support_finds_the_gpu(cuda):
    report = ferromla.support()
    assert (report["backend"], report["device"]) == ("cuda", "cuda:0")
    assert report["kernels"]
    assert report["compiler"].startswith("nvcc ")
    assert ferromla.support(cuda)["device_name"] == torch.cuda.get_device_name()


def test_the_command_line():
    assert "decode" in _python("-m", "ferromla", "--device", "cpu")
    assert json.loads(_python("-m", "ferromla", "--json", "--device", "cpu"))["backend"] == "cpu"
    assert ferromla.__version__ in _python("-m", "ferromla", "--version")
    main = importlib.import_module("ferromla.__main__").main
    assert main(["--device", "cuda:77"]) == 1


def test_operators_pass_torchs_own_checks(device):
    problem = problems.make(h=16, s_q=2, lens=[100, 0, 70], device=device)
    inputs = (problem.q, problem.cache.nan_to_num(), problem.table, problem.lens)
    out, lse = (torch.zeros_like(x) for x in problems.poisoned_outputs(problem.q))
    torch.library.opcheck(torch.ops.ferromla.decode.default, inputs)
    torch.library.opcheck(torch.ops.ferromla.decode_out.default, (*inputs, out, lse))
    indptr = torch.tensor([0, 1, 1, 6], dtype=torch.int32, device=device)
    ragged = (problem.q.flatten(0, 1), *inputs[1:], indptr)
    ragged_out = out.flatten(0, 1), lse.flatten(0, 1)
    torch.library.opcheck(torch.ops.ferromla.prefill.default, ragged)
    torch.library.opcheck(torch.ops.ferromla.prefill_out.default, (*ragged, *ragged_out))
    torch.library.opcheck(torch.ops.ferromla.merge_states.default, (out, lse, out, lse))
    torch.library.opcheck(torch.ops.ferromla.merge_states_out.default, (out, lse, out, lse, out.clone(), lse.clone()))
    rows = (
        torch.zeros(2, 512, dtype=torch.bfloat16, device=device),
        torch.zeros(2, 64, dtype=torch.bfloat16, device=device),
    )
    slots = torch.tensor([3, -1], device=device)
    torch.library.opcheck(torch.ops.ferromla.append_kv.default, (*rows, inputs[1], slots))


def test_operators_give_what_the_functions_give(device):
    problem = problems.make(h=16, s_q=2, lens=[100, 0, 70], device=device)
    inputs = (problem.q, problem.cache, problem.table, problem.lens)
    tolerance.check(*torch.ops.ferromla.decode(*inputs), *problem.expected())
    out, lse = problems.poisoned_outputs(problem.q)
    torch.ops.ferromla.decode_out(*inputs, out, lse, causal=False)
    tolerance.check(out, lse, *problem.expected(causal=False))
    options = {
        "softmax_scale": 0.05,
        "causal": False,
        "attn_sink": torch.linspace(-2, 2, 16, device=device),
        "num_splits": 3,
        "batch_invariant": False,
    }
    want = ferromla.decode(*inputs, **options)
    torch.ops.ferromla.decode_out(*inputs, out, lse, *options.values())
    for got in (torch.ops.ferromla.decode(*inputs, **options), (out, lse)):
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
    invariant = torch.ops.ferromla.decode(*inputs, batch_invariant=True)
    assert torch.equal(invariant[0], ferromla.decode(*inputs, batch_invariant=True)[0])


def test_the_prefill_operators_give_what_the_function_gives(device):
    problem = problems.make(h=16, lens=[100, 0, 70], q_lens=[3, 1, 2], device=device)
    inputs = (problem.q, problem.cache, problem.table, problem.lens, problem.indptr)
    options = {"softmax_scale": 0.05, "causal": False, "num_splits": 3}
    out, lse = problems.poisoned_outputs(problem.q)
    torch.ops.ferromla.prefill_out(*inputs, out, lse, **options)
    for got in (torch.ops.ferromla.prefill(*inputs, **options), (out, lse)):
        tolerance.check(*got, *problem.expected(**options))


def test_the_sparse_operators_give_what_the_functions_give(device):
    problem = problems_sparse.decode(extra=(90, 70, 5), lens="row", device=device)
    inputs, extra = (problem.q, problem.main.cache, problem.main.indices), problem.extra
    options = (problem.main.lens, None, extra.cache, extra.indices, extra.lens)
    out, lse = problems.poisoned_outputs(problem.q)
    torch.ops.ferromla.sparse_decode_out(*inputs, out, lse, *options, softmax_scale=0.05, num_splits=2)
    got = torch.ops.ferromla.sparse_decode(*inputs, *options, softmax_scale=0.05, num_splits=2)
    for each in (got, (out, lse)):
        tolerance.check(*each, *problem.expected(softmax_scale=0.05))

    problem = problems_sparse.prefill(topk=1000, lens="row", device=device, softmax_scale=0.05)
    inputs = problem.q, problem.keys.cache, problem.keys.indices, problem.keys.lens
    for options in ({}, {"batch_invariant": True}):
        want = problem.check(**options)
        outputs = [torch.full_like(x, problems.NAN) for x in want]
        torch.ops.ferromla.sparse_prefill_out(*inputs[:3], *outputs, inputs[3], softmax_scale=0.05, **options)
        for each in (torch.ops.ferromla.sparse_prefill(*inputs, softmax_scale=0.05, **options), outputs):
            assert all(torch.equal(a, b) for a, b in zip(want, each, strict=True))


def test_the_sparse_operators_pass_torchs_own_checks(device):
    problem = problems_sparse.decode(device=device)
    inputs = problem.q, problem.main.cache.nan_to_num(), problem.main.indices
    out, lse = (torch.zeros_like(x) for x in problems.poisoned_outputs(problem.q))
    torch.library.opcheck(torch.ops.ferromla.sparse_decode.default, inputs)
    torch.library.opcheck(torch.ops.ferromla.sparse_decode_out.default, (*inputs, out, lse))
    inputs = inputs[0].flatten(0, 1), inputs[1], inputs[2].flatten(0, 1)
    outputs = out.flatten(0, 1), lse.flatten(0, 1), lse.flatten(0, 1).clone()
    torch.library.opcheck(torch.ops.ferromla.sparse_prefill.default, inputs)
    torch.library.opcheck(torch.ops.ferromla.sparse_prefill_out.default, (*inputs, *outputs))


def test_operators_compile_without_a_graph_break():
    problem = problems.make(h=16, s_q=2, lens=[100, 0, 70])
    cache = problem.cache

    def layer(q, table, lens):
        out, lse = torch.ops.ferromla.decode(q * 2, cache, table, lens)
        return out + 1, lse

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    got, want = (f(problem.q, problem.table, problem.lens) for f in (compiled, layer))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
