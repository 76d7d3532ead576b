"""The benches themselves, on shrunk shapes and the CPU backend."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import torch

BENCHES = pathlib.Path(__file__).parents[2] / "benches"


def _run(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCHES / "bench.py"), "--small", "--device", "cpu", *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_table_runs_is_right_and_fits_the_page(tmp_path, monkeypatch):
    done = _run("--markdown", "--json", str(tmp_path / "results.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    tables = results["tables"]
    counts = {name: len(rows) for name, rows in tables.items()}
    expected = {"decode": 24, "prefill": 10, "pages": 12, "uneven": 12, "invariance": 24, "quantised": 20}
    expected |= {"invariance_parts": 12}
    expected |= {"sparse": 10, "sparse_v4": 6, "sparse_v41": 12, "sparse_absent": 12, "sparse_prefill": 5}
    expected |= {"prefill_hints": 6, "prefill_copies": 8, "sparse_prefill_copies": 5, "sparse_prefill_few": 20}
    expected |= {"sparse_prefill_heads": 16}
    expected |= {"cache_ops": 33, "index_ops": 7, "plan": 24, "host": 10}
    assert counts == expected
    assert all(row["us"] > 0 for rows in tables.values() for row in rows)
    assert all(row["same"] == "yes" for row in tables["plan"])
    assert all(row["right"] == "yes" for name in ("cache_ops", "index_ops") for row in tables[name])
    # A shape is not the real one here, so nothing is met or missed.
    assert not any(row.get("verdict") for rows in tables.values() for row in rows)
    monkeypatch.syspath_prepend(str(BENCHES))
    import fill_docs

    filled = [fill_docs.fill(page.read_text(), results, "0123abc") for page in fill_docs.PAGES]
    for lines in results["markdown"].values():
        assert sum("\n".join(lines) in page for page in filled) == 1, lines[0]
    for page in filled:
        assert page.count("0123abc") == 1
        assert fill_docs.fill(page, {**results, "markdown": {}}, "0123abc") == page


def test_tables_and_lines_are_chosen_by_name(tmp_path):
    done = _run("--tables", "decode,plan", "--rows", "h=16", "--json", str(tmp_path / "results.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    tables = json.loads((tmp_path / "results.json").read_text())["tables"]
    assert [len(rows) for rows in tables.values()] == [0, 15]
    assert "nosuch" in _run("--tables", "nosuch").stderr


@pytest.fixture
def benches(monkeypatch):
    """The modules of the benches."""
    monkeypatch.syspath_prepend(str(BENCHES))
    import measure
    import shapes

    return measure, shapes


@pytest.mark.parametrize("ragged", [False, True])
def test_errors_see_one_wrong_row(benches, ragged):
    measure, shapes = benches
    case = shapes.Case("", (70, 0, 129), (2, 2, 2), 4, ragged=ragged)
    torch.manual_seed(0)
    inputs = measure.Inputs(case, torch.float16, torch.device("cpu"))
    assert measure.errors(inputs).wrong  # nothing has been written yet
    inputs.call(inputs.plan())()
    assert not measure.errors(inputs).wrong
    out, lse = inputs.out.view(-1, 4, 512), inputs.lse.view(-1, 4)
    out[5, 3] *= 1.1
    lse[5, 3] += 0.25
    found = measure.errors(inputs)
    assert found.wrong
    assert found.lse == pytest.approx(0.25, abs=1e-3)
    out[5, 3, 0] = float("nan")
    assert measure.errors(inputs).wrong


def test_the_longest_request_is_always_compared(benches):
    measure, shapes = benches
    case = shapes.Case("", (9, 9, 9, 70, 9, 9), (1,) * 6, 4)
    inputs = measure.Inputs(case, torch.float16, torch.device("cpu"))
    inputs.call(inputs.plan())()
    assert not measure.errors(inputs, requests=2).wrong
    inputs.out[3] += 1
    assert measure.errors(inputs, requests=2).wrong


def test_operations_and_bytes_are_counted_as_documented(benches):
    _, shapes = benches
    case = shapes.Case("", (100, 3), (2, 4), 16, ragged=True)
    assert case.operations == 2 * 1088 * 16 * (2 * 100 + 4 * 3)
    assert case.seen_operations == 2 * 1088 * 16 * (99 + 100 + 0 + 1 + 2 + 3)
    assert case.bytes_moved == 103 * 1152 + 6 * 16 * 1088 * 2


def test_an_even_batch_has_as_many_requests_and_tokens(benches):
    _, shapes = benches
    case = shapes.Case("", (1, 7, 0, 90), (1,) * 4, 16)
    assert shapes.same_total(case).seq_lens == (25, 25, 24, 24)
