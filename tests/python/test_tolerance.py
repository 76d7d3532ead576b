"""The comparison itself: what it lets pass, and what it says."""

from __future__ import annotations

import functools

import pytest
import torch

import tolerance

OUT, LSE = torch.linspace(-1, 1, 1024).view(2, 512).double(), torch.tensor([3.0, -torch.inf]).double()


def _changed(number, to):
    out = OUT.clone()
    out[1, number] = to
    return out


def _cases(outs):
    for index, out in enumerate(outs):
        compared = out, LSE, OUT, LSE
        yield f"case {index}", tolerance.all_near(*compared), functools.partial(tolerance.faults, *compared)


def test_rounding_passes():
    assert tolerance.check_cases(lambda: _cases([OUT.bfloat16(), OUT.half(), OUT])) == 3


@pytest.mark.parametrize("wrong", [1.05, torch.nan, torch.inf, -1.0])
def test_one_number_off_is_named_with_its_case(wrong):
    with pytest.raises(AssertionError, match="1 of 3 cases") as told:
        tolerance.check_cases(lambda: _cases([OUT, _changed(511, wrong), OUT]))
    assert "case 1: out: 1 of 1024 off; at (1, 511)" in str(told.value)
    assert "case 0" not in str(told.value)


def test_what_is_wrong_only_once_fails_too():
    runs = iter([[OUT, _changed(5, 9.0)], [OUT, OUT]])
    with pytest.raises(AssertionError, match="case 1: right when computed again"):
        tolerance.check_cases(lambda: _cases(next(runs)))


@pytest.mark.parametrize("lse", [[3.1, -torch.inf], [3.0, -1e30], [torch.nan, -torch.inf], [3.0, torch.inf]])
def test_a_wrong_lse_is_seen(lse):
    assert tolerance.faults(OUT, torch.tensor(lse), OUT, LSE)
    assert not tolerance.faults(OUT, LSE.float(), OUT, LSE)


def test_numbers_too_small_for_all_their_bits_may_be_as_far_off_as_rounding_is():
    small = torch.full((1, 512), 5.7e-6, dtype=torch.float64)
    lse = torch.zeros(1)
    assert not tolerance.faults(small.half(), lse, small, lse.double())
    assert tolerance.faults(2 * small.half(), lse, small, lse.double())
    assert tolerance.faults(small.bfloat16() * 1.01, lse, small, lse.double())
