"""Fixtures shared by all tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each backend in turn; the CUDA one belongs to the tests marked gpu."""
    return torch.device(request.param)


@pytest.fixture
def cuda() -> torch.device:
    """The CUDA device, for tests marked gpu: without one they fail, they are not skipped."""
    assert torch.cuda.is_available(), "tests marked gpu need a CUDA device: deselect them with -m 'not gpu'"
    return torch.device("cuda")
