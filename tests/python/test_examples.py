"""The examples of more than one process, which exit with 1 where their results are wrong, and the README's on a GPU."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

import ferromla

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


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


@pytest.mark.gpu
def test_the_step_that_the_readme_captures(cuda):
    readme = (ROOT / "README.md").read_text()
    (program,) = (block for block in readme.split("```python\n")[1:] if "CUDAGraph" in block.partition("```")[0])
    names = {"ferromla": ferromla}
    exec(program.partition("```")[0], names)
    names["cache"].zero_()
    names["graph"].replay()
    assert torch.allclose(names["lse"][:, 0].exp(), names["seq_lens"][:, None].float())
    assert bool((names["out"] == 0).all())
