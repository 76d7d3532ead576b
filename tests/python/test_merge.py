"""merge_states against its formula, and against attention over the joined keys."""

from __future__ import annotations

import pytest
import torch

import ferromla
import problems
import tolerance

INF = float("inf")


def _expected(out_a, lse_a, out_b, lse_b):
    out_a, out_b, lse_a, lse_b = (x.double() for x in (out_a, out_b, lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    weight = lambda x: torch.where(torch.isneginf(x), 0.0, torch.exp(x - lse)).unsqueeze(-1)  # noqa: E731
    a = torch.where(weight(lse_a) == 0, 0.0, out_a * weight(lse_a))
    b = torch.where(weight(lse_b) == 0, 0.0, out_b * weight(lse_b))
    return a + b, lse


def _random(shape, dtype, device, seed):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *dims: torch.randn(*dims, generator=generator).to(device)  # noqa: E731
    return make(*shape, 512).to(dtype), make(*shape) * 3, make(*shape, 512).to(dtype), make(*shape) * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5,), (7, 16), (3, 2, 128), (0, 2, 16)])
def test_matches_the_formula(device, dtype, shape):
    states = _random(shape, dtype, device, 0)
    tolerance.check(*ferromla.merge_states(*states), *_expected(*states))


def test_a_side_without_keys_does_not_count(device):
    out_a, lse_a, out_b, lse_b = _random((4, 16), torch.bfloat16, device, 1)
    lse_a[0], lse_b[1] = -INF, -INF
    lse_a[2], lse_b[2] = -INF, -INF
    out_a[0] = problems.NAN
    out, lse = ferromla.merge_states(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out[0], out_b[0])
    assert torch.equal(out[1], out_a[1])
    assert bool((out[2] == 0).all())
    assert bool(torch.isneginf(lse[2]).all())


@pytest.mark.parametrize("other", [-INF, 0.5])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_lse_of_nan_makes_nan(device, other, is_first):
    """Of a row that is NaN itself, also beside a side without keys, whose weight is 0; other rows are as ever."""
    out_a, lse_a, out_b, lse_b = _random((4, 16), torch.bfloat16, device, 4)
    want_out, want_lse = _expected(out_a, lse_a, out_b, lse_b)
    wrong, right = (lse_a, lse_b) if is_first else (lse_b, lse_a)
    wrong[1], right[1] = problems.NAN, other
    (out_a if is_first else out_b)[1] = problems.NAN
    out, lse = ferromla.merge_states(out_a, lse_a, out_b, lse_b)
    assert bool(out[1].isnan().all())
    assert bool(lse[1].isnan().all())
    rest = [0, 2, 3]
    tolerance.check(out[rest], lse[rest], want_out[rest], want_lse[rest])


def test_in_place_and_strided(device):
    out_a, lse_a, out_b, lse_b = _random((6, 2, 16), torch.float16, device, 2)
    want = _expected(out_a, lse_a, out_b, lse_b)
    wide = torch.full((6, 2, 16, 600), problems.NAN, dtype=torch.float16, device=device)
    wide[..., :512] = out_b
    out, lse = ferromla.merge_states(out_a, lse_a, wide[..., :512], lse_b, out=out_a, lse=lse_a)
    assert out is out_a
    tolerance.check(out, lse, *want)
    assert bool(torch.isnan(wide[..., 512:]).all())


def test_two_halves_of_the_keys_make_the_whole(device):
    """Attention over pages 0-3 and over pages 4-6, merged, is attention over all of them."""
    problem = problems.make(b=3, h=16, lens=[448, 448, 448], device=device, causal=False)
    first, second = (
        ferromla.decode(
            problem.q,
            problem.cache,
            problem.table[:, part].contiguous(),
            problem.lens - removed,
            causal=False,
        )
        for part, removed in ((slice(0, 4), 192), (slice(4, 7), 256))
    )
    tolerance.check(*ferromla.merge_states(*first, *second), *problem.expected(causal=False))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("out_b", lambda s: (*s[:2], s[2][:-1], s[3])),
        ("lse_a", lambda s: (s[0], s[1][:-1], *s[2:])),
        ("lse_b", lambda s: (*s[:3], s[3].half())),
        ("out_b", lambda s: (*s[:2], s[2].half(), s[3])),
        ("out_a", lambda s: (s[0].int(), *s[1:])),
    ],
)
def test_mismatches_are_refused_by_name(device, argument, change):
    states = change(_random((4, 16), torch.bfloat16, device, 3))
    with pytest.raises(ferromla.InvalidArgument) as caught:
        ferromla.merge_states(*states)
    assert caught.value.argument == argument
