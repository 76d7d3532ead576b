"""Samples of a grid in which every pair of values meets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable


def sample(axes: dict[str, tuple], allowed: Callable[[tuple], bool], seed: int = 0) -> list[tuple]:
    """Allowed cases that together hold every pair of values that some allowed case holds; the case of each axis's
    first values is allowed, and so is any that differs from an allowed one towards it."""
    rng = random.Random(seed)
    values = list(axes.values())
    cheapest = tuple(axis[0] for axis in values)
    every_pair = (
        ((i, x), (j, y)) for i, j in itertools.combinations(range(len(values)), 2) for x in values[i] for y in values[j]
    )
    missing = [pair for pair in every_pair if allowed(_with(cheapest, pair))]
    found = []
    while missing:
        candidates = [_with(cheapest, missing[0])]
        candidates += [_with(tuple(map(rng.choice, values)), missing[0]) for _ in range(60)]
        candidates = [case for case in candidates if allowed(case)]
        best = max(candidates, key=lambda case: len(_pairs(case).intersection(missing)))
        missing = [pair for pair in missing if pair not in _pairs(best)]
        found.append(best)
    return found


def _pairs(case: tuple) -> set:
    """Each value of the case with each value of another axis."""
    return set(itertools.combinations(enumerate(case), 2))


def _with(case: tuple, pair: tuple) -> tuple:
    """The case with the pair's two values in their places."""
    values = list(case)
    for axis, value in pair:
        values[axis] = value
    return tuple(values)
