"""The linear program of tree_packing.py, by the simplex method: the largest sum, within each link's limit.

    max sum_j x_j    with    uses x <= limits,  x >= 0

Nothing is carried at first, so no start has to be looked for. With up to 160 links and some dozens of trees it takes
a tenth to a half of the time of a general solver, of which most goes into reading the program.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NEGLIGIBLE = 1e-9
"""Prices and what a tree gains are sums of a few small numbers, whatever the limits are."""

PIVOTS_PER_SIDE = 20
"""Times rows and columns together, at most; it takes fewer than one. What is found by then can be carried."""


def most_carried(uses: Floats, limits: Floats) -> tuple[Floats, Floats]:
    """The optimum, and its prices.

    Args:
        uses: [links, trees], 1 where a tree has a link, else 0; every tree has at least one.
        limits: [links], > 0.
    Returns: x [trees], and prices [links]: by how much the sum grows with a limit, >= 0.
    """
    rows, columns = uses.shape
    # Rows are variables in use, columns those that are 0; the last ones are prices and values.
    table = np.zeros((rows + 1, columns + 1))
    table[:rows, :columns] = uses
    table[:rows, columns] = limits
    table[rows, :columns] = -1.0
    # From `columns` on: what a link has left.
    unused, used = np.arange(columns), np.arange(columns, columns + rows)
    stuck = False
    for _ in range(PIVOTS_PER_SIDE * (rows + columns)):
        column = _entering(table[rows, :columns], unused, stuck)
        if column < 0:
            break
        row, step = _leaving(table, column, used)
        stuck = step <= 0
        _pivot(table, row, column)
        unused[column], used[row] = used[row], unused[column]
    carried, prices = np.zeros(columns), np.zeros(rows)
    trees, links = used < columns, unused >= columns
    carried[used[trees]] = np.maximum(table[:rows, columns][trees], 0.0)
    prices[unused[links] - columns] = np.maximum(table[rows, :columns][links], 0.0)
    return carried, prices


def _entering(costs: Floats, unused: NDArray[np.int64], stuck: bool) -> int:
    """The column that gains most; the first that gains after a step that gained nothing, against circles (Bland)."""
    if not stuck:
        best = int(costs.argmin())
        return best if costs[best] < -NEGLIGIBLE else -1
    gaining = np.flatnonzero(costs < -NEGLIGIBLE)
    return int(gaining[unused[gaining].argmin()]) if len(gaining) else -1


def _leaving(table: Floats, column: int, used: NDArray[np.int64]) -> tuple[int, float]:
    """The row that is the first to reach 0, the lowest variable's among equals; and how far that is."""
    able = np.flatnonzero(table[:-1, column] > NEGLIGIBLE)
    steps = table[able, -1] / table[able, column]
    least = float(steps.min())
    equal = able[steps <= least + NEGLIGIBLE * abs(least)]
    return int(equal[used[equal].argmin()]), least


def _pivot(table: Floats, row: int, column: int) -> None:
    """Exchange the variables of a row and a column."""
    pivot, before = table[row, column], table[:, column].copy()
    before[row] = 0.0
    table[:, column] = 0.0
    table[row, column] = 1.0
    table[row] /= pivot
    table -= np.outer(before, table[row])
