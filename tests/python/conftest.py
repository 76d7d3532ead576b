"""Fixtures shared by all tests, and what the processes of pytest-xdist share."""

from __future__ import annotations

import functools
import os

import pytest
import torch

import emulated

PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
# Of the GPU's memory, what torch may take in all processes; contexts and kernels need some as well.
TORCHS_SHARE = 0.93


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--emulated``: what needs a GPU and no CUDA of torch's runs on the emulated one."""
    parser.addoption("--emulated", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    """Threads of all processes that together want more than all cores wait for one another."""
    if config.getoption("--emulated"):
        emulated.install()
    if PROCESSES > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // PROCESSES))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of several GPUs are no part of a run where there is one."""
    fewer = [item for item in items if item.get_closest_marker("gpus")] if torch.cuda.device_count() < 2 else []
    config.hook.pytest_deselected(items=fewer)
    items[:] = [item for item in items if item not in fewer]


@functools.cache
def _cuda() -> torch.device:
    """The CUDA device. What a process has freed it keeps until it reaches its share."""
    if emulated.is_installed():
        return torch.device("cpu")
    assert torch.cuda.is_available(), "tests marked gpu need a CUDA device: deselect them with -m 'not gpu'"
    if PROCESSES > 1:
        torch.cuda.set_per_process_memory_fraction(TORCHS_SHARE / PROCESSES)
    return torch.device("cuda")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each backend in turn; the CUDA one belongs to the tests marked gpu."""
    return _cuda() if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def cuda() -> torch.device:
    """The CUDA device, for tests marked gpu: without one they fail, they are not skipped."""
    return _cuda()
