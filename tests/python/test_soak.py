"""A short run of the soak on the CPU backend, and that it sees what it is there to see."""

from __future__ import annotations

import os
import time

import pytest

import ferromla
import soak
import soak_spec

SHORT = ["--device", "cpu", "--seed", "7"]


def test_random_problems_match_float64(capsys):
    assert soak.main([*SHORT, "--problems", "200"]) == 0, capsys.readouterr().out


def _index_of(wanted) -> int:
    """The first problem with a result that is like this."""
    specs = (soak_spec.draw(7, index, soak_spec.CPU) for index in range(1000) if index % 3 != 2)
    return next(spec.index for spec in specs if sum(spec.q_lens) and min(spec.clamped) > 0 and wanted(spec))


def _one_number_off(operation):
    def run(*args, **options):
        out, lse = operation(*args, **options)
        if out.numel():
            out[..., 0, 17] += 0.05
        return out, lse

    return run


def _writes_beside(operation):
    def run(*args, out, **options):
        operation(*args, out=out, **options)
        if out.numel():
            out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(0)

    return run


def _break(wrong) -> None:
    ferromla.decode, ferromla.prefill = wrong(ferromla.decode), wrong(ferromla.prefill)


def make_numbers_wrong() -> None:
    """For the soak's processes."""
    _break(_one_number_off)


def make_calls_raise() -> None:
    """For the soak's processes."""
    _break(lambda _: lambda *_, **__: 1 // 0)


def make_calls_hang() -> None:
    """For the soak's processes."""
    _break(lambda _: lambda *_, **__: time.sleep(1000))


def make_processes_die() -> None:
    """For the soak's processes."""
    _break(lambda _: lambda *_, **__: os._exit(9))


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (make_numbers_wrong, "out: "),
        (make_calls_raise, "ZeroDivisionError"),
        (make_calls_hang, "problem 0: hangs"),
        (make_processes_die, "problem 0: the process ended with status 9"),
    ],
    ids=["wrong", "error", "hang", "crash"],
)
def test_a_failure_names_its_problem(before, words, capsys):
    assert soak.main([*SHORT, "--problems", "3", "--hang-seconds", "3"], before) == 1
    told = capsys.readouterr().out
    assert words in told
    assert "seq_lens = (" in told
    assert "soak.py --seed 7 --device cpu --only" in told


@pytest.mark.parametrize("operation", ["decode", "prefill"])
@pytest.mark.parametrize(("wrong", "what"), [(_one_number_off, "out: "), (_writes_beside, "outside of out")])
def test_a_fault_of_one_number_is_seen(operation, wrong, what, monkeypatch):
    index = _index_of(lambda spec: spec.operation == operation and spec.wide_out)
    run = soak.Soak(1, 7, 1, "cpu", 60)
    pool = run.pool()
    assert run.faults(index, pool) == []
    monkeypatch.setattr(ferromla, operation, wrong(getattr(ferromla, operation)))
    assert any(fault.startswith(what) for fault in run.faults(index, pool))


def _one_number_off_of_sparse(operation):
    def run(*args, **options):
        results = operation(*args, **options)
        options["out"][..., 0, 17] += 0.05
        return results

    return run


@pytest.mark.parametrize("operation", ["sparse_decode", "sparse_prefill"])
def test_a_fault_of_one_number_of_sparse_attention_is_seen(operation, monkeypatch):
    run = soak.Soak(1, 7, 1, "cpu", 60)
    specs = (run.spec(index) for index in range(2, 300, 3))
    index = next(spec.index for spec in specs if spec.operation == operation and spec.rows and spec.absent < 0.5)
    pool = run.pool()
    assert run.faults(index, pool) == []
    monkeypatch.setattr(ferromla, operation, _one_number_off_of_sparse(getattr(ferromla, operation)))
    assert any(fault.startswith("out: ") for fault in run.faults(index, pool))


def test_a_problem_is_the_same_every_time():
    first, second = (soak_spec.draw(3, 11, soak_spec.GPU) for _ in range(2))
    assert str(first) == str(second)
    assert str(soak_spec.draw(3, 12, soak_spec.GPU)) != str(first)
