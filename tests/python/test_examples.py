"""The examples of more than one process, which exit with 1 where their results are wrong."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("cpu", 2),
        pytest.param("cuda", 1, marks=pytest.mark.gpu),
        pytest.param("cuda", 2, marks=[pytest.mark.gpu, pytest.mark.gpus]),
    ],
)
def test_context_parallel(kind, ranks):
    """Two ranks merge what each has of the other's requests."""
    hidden = {} if kind == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = [*command, str(EXAMPLES / "context_parallel.py")]
    run = subprocess.run(program, env=os.environ | hidden, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(f"of {ranks} on {kind}") == ranks
