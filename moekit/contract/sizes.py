"""Sizes: the padded sizes that experts compute, and sizes for people.

Kernels may need the hidden size and a rank's intermediate size to be multiples of some numbers.
Experts are then created for a padded problem.
"""

from __future__ import annotations

import math

from moekit.errors import InvalidProblem
from moekit.problem import MoEProblem

MOST = 1 << 12  # of a multiple
Multiples = tuple[int, int]
"""The multiples that the hidden size and a rank's intermediate size must be."""


def size_text(nbytes: int) -> str:
    """Return ``nbytes`` in B, KiB, MiB or GiB, with three digits or more."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"


def padded(problem: MoEProblem, multiples: Multiples) -> MoEProblem:
    """Return ``problem`` with its sizes rounded up, or itself if they are multiples already.

    Rows and columns of zeros make up the difference, and add nothing to the output. Blocks of
    scales that cover whole neurons stay whole.
    """
    hidden, inner = problem.hidden_size, problem.local_intermediate_size
    weight, (of_hidden, of_inner) = problem.quant.weight, multiples
    if inner % of_inner and weight is not None and weight.group[0] > 1:
        of_inner = math.lcm(of_inner, weight.group[0])
    changes = {}
    if hidden % of_hidden:
        changes["hidden_size"] = round_up(hidden, of_hidden)
    if inner % of_inner:
        changes["intermediate_size"] = round_up(inner, of_inner) * problem.parallel.tp_size
    try:
        return problem.replace(**changes) if changes else problem
    except InvalidProblem:  # too large: `faults` says so
        return problem


def faults(problem: MoEProblem, made: MoEProblem, multiples: Multiples) -> list[str]:
    """Return why padding to ``made`` would not be exact, or is not possible at all."""
    weight, inner = problem.quant.weight, problem.local_intermediate_size
    if made.hidden_size % multiples[0] or made.local_intermediate_size % multiples[1]:
        return [
            f"H={problem.hidden_size} and I={inner} must be multiples of {multiples[0]} and "
            f"{multiples[1]}, and are too large to be padded"
        ]
    if weight is None or made == problem:
        return []
    if weight.codes.zero is None:
        return [f"{weight.dtype} has no code of 0, so H={problem.hidden_size} and I={inner} stay"]
    if problem.hidden_size % (per_byte := weight.codes.per_byte) or inner % per_byte:
        sizes = f"H={problem.hidden_size} and I={inner}"
        return [f"{sizes} must be multiples of {per_byte}: a byte packs so many columns"]
    return []


def words(problem: MoEProblem, made: MoEProblem) -> str:
    """Return what is padded, for people; "" if nothing is."""
    sizes = (
        ("hidden size", problem.hidden_size, made.hidden_size),
        ("intermediate size", problem.local_intermediate_size, made.local_intermediate_size),
    )
    return " and ".join(f"{name} {was} padded to {now}" for name, was, now in sizes if was != now)


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple
