"""Errors of the Python side, as the compiled module makes them."""

from __future__ import annotations

from typing import Any


def error(kind: Any, argument: str, value: str, rule: str) -> Any:
    """An error of that kind: what is wrong as its text, and its parts as attributes."""
    made = kind(f"{argument} is {value}: {rule}")
    made.argument, made.value, made.rule = argument, value, rule
    return made
