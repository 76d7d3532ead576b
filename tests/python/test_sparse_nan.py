"""A NaN in a quantised cache, be it a scale, a code or a rotary number, shows where it is attended and nowhere else."""

from __future__ import annotations

import pytest
import torch

import problems_sparse
import reference_formats as formats
import tolerance

FORMS = {f"{form.name}-{form.d_qk}": form for form in formats.FORMATS}
NO_MAIN_CACHE = "fp4_v41-512", "main"
COUNTED = 100
# Where the lists of the query tokens have the token: counted in the first two tiles and as the last one, not counted,
# and not at all.
COUNTED_AT = {0: 0, 3: 70, 4: COUNTED - 1}
NOT_COUNTED_AT = {1: COUNTED, 5: 129}


def _scale_bytes(form):
    """For some groups: where the bytes of its scale are, and bytes that are NaN."""
    groups = form.coded // form.group if form.group else 0
    size = 4 if form.scale == "float32" else 1
    nans = (0x7F, 0xFF) if form.scale == "e4m3" else (0xFF,)
    for group in sorted({0, groups // 2, groups - 1} if groups else ()):
        for nan in nans:
            yield "scales", slice(group * size, (group + 1) * size), nan


def _nans(form):
    """``(part, bytes, value)`` of all that is NaN for the format."""
    yield from _scale_bytes(form)
    if form.codes == "e4m3":
        yield from (("codes", slice(at, at + 1), nan) for at in (0, 200, form.coded - 1) for nan in (0x7F, 0xFF))
    if form.rope_bytes:
        yield from (("rope", slice(2 * at, 2 * at + 2), 0xFF) for at in (0, 63))


def _changed(cache, form, token, part, where, value):
    """Changes bytes of a token and gives what they were."""
    slots = torch.tensor([token], device=cache.device)
    tokens = formats.read(cache, form)[slots]
    was = getattr(tokens, part)[:, where].clone()
    getattr(tokens, part)[:, where] = value
    formats.write(cache, form, slots, tokens)
    return was


def _problem(form, h, which, device):
    """A problem whose lists have one token at the places above, and that token; the cache of the format is the main
    one or the extra one."""
    extra = (300, 130, 61)
    problem = problems_sparse.decode(b=6, s_q=1, h=h, topk=130, extra=extra, d_qk=form.d_qk, device=device)
    keys = getattr(problem, which)
    lists = keys.lists()
    token, other = lists.indices[lists.chosen()].unique()[[17, 40]].tolist()
    keys.indices[keys.indices == token] = other
    for row, at in (COUNTED_AT | NOT_COUNTED_AT).items():
        keys.indices[row, 0, at] = token
    keys.lens = torch.full((6, 1), COUNTED, dtype=torch.int32, device=device)
    main = "fp8_v41" if form.name == "fp4_v41" else form.name
    problem.main, problem.extra = problem.main.quantised(main), problem.extra.quantised(form.name)
    return problem, token


@pytest.mark.parametrize("h", [16, 32, 128])
@pytest.mark.parametrize(
    ("name", "which"), [(n, w) for n in FORMS for w in ("main", "extra") if (n, w) != NO_MAIN_CACHE]
)
def test_nan_shows_where_it_is_attended_and_nowhere_else(device, name, h, which):
    form = FORMS[name]
    problem, token = _problem(form, h, which, device)
    want_out, want_lse = problem.expected()
    hit = torch.zeros(6, dtype=torch.bool, device=device)
    hit[list(COUNTED_AT)] = True
    cache = getattr(problem, which).cache
    for part, where, value in _nans(form):
        was = _changed(cache, form, token, part, where, value)
        for num_splits in (None, 2):
            out, lse = problem.run(num_splits=num_splits)
            told = f"{part} {where.start} = {value:#x}, {num_splits} splits"
            assert bool(out[hit].isnan().all()), f"{told}: out of who attends it"
            assert bool(lse[hit].isnan().all()), f"{told}: lse of who attends it"
            assert not tolerance.faults(out[~hit], lse[~hit], want_out[~hit], want_lse[~hit]), f"{told}: others"
        _changed(cache, form, token, part, where, was)
    problem.check()


@pytest.mark.parametrize("h", [16, 32, 128])
def test_the_byte_behind_the_scales_of_fp8_v4_is_none(device, h):
    form = FORMS["fp8_v4-512"]
    problem, token = _problem(form, h, "main", device)
    want = problem.check()
    _changed(problem.main.cache, form, token, "scales", slice(7, 8), 0xFF)
    assert all(torch.equal(a, b) for a, b in zip(want, problem.run(), strict=True))
