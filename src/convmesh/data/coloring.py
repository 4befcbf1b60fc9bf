"""Balanced edge colouring: which shard gets which sample of a stratified epoch.

The samples of an epoch are the edges of a bipartite multigraph between *rows* (global batches) and classes; the colour
of an edge is the shard that computes it. A balanced colouring has, at every row, every class and every (row, class)
pair, numbers of edges per colour that differ by at most one. One exists for every number of colours (D. de Werra,
"Equitable colorations of graphs", 1971); `balanced_colours` finds it, and the argument below proves it.

Full rows are laid out by arithmetic: sample p of the class-sorted epoch is in row p mod M. The start colour
``(p + (p mod MR) // lcm(M, R)) mod R`` has the period R along a row, so rows and pairs are balanced from the start.
Classes are intervals of p: balanced too, except those that cross a multiple of lcm(M, R). What is left is repaired
by *trails*. Let a class hold two more edges of colour a than of colour b. Draw an arc class -> row for every pair with
more a than b, and row -> class for every pair with more b than a. The class then has at least two more arcs out than
in, balanced nodes have as many out as in, so a trail that uses no arc twice can only end at a node with more arcs in
than out. Swapping a and b on one edge of each arc leaves all nodes between as they were, takes two off the excess at
the start, and makes the end no worse. Every trail lowers the sum of squared counts, so the repair ends.

Legend: M full rows, B edges per full row, R colours, C classes, P = M x B edges in full rows, T edges in the tail row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Colours = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Layout:
    """The samples of an epoch as a graph, class by class.

    Args:
        num_rows: Full rows M.
        row_size: Edges B of a full row, divisible by the number of colours.
        starts_C1: Where each class begins among the P edges of full rows; the last entry is P.
        tail_starts_C1: Where each class begins among the T edges of the tail row; the last entry is T.
    """

    num_rows: int
    row_size: int
    starts_C1: Ints
    tail_starts_C1: Ints


def balanced_colours(layout: Layout, *, num_colours: int, rng: np.random.Generator) -> tuple[Colours, Colours]:
    """Colours all edges so that every row, class and (row, class) pair is balanced.

    Args:
        layout: The graph.
        num_colours: Number of colours R; divides ``layout.row_size``.
        rng: Decides between equally good choices.

    Returns:
        The colours of the P edges of full rows and of the T edges of the tail row, from 0 to R - 1.
    """
    colouring = _Colouring(layout, num_colours, rng)
    colouring.colour_tail()
    colouring.balance()
    return colouring.kept_P, colouring.tail_T


def _start_colours(num_rows: int, *, row_size: int, num_colours: int) -> Colours:
    dtype = np.min_scalar_type(num_colours - 1)
    period = num_rows * num_colours
    if not period:
        return np.zeros(0, dtype=dtype)
    p = np.arange(period, dtype=np.int64)
    one_period = (p + p // math.lcm(num_rows, num_colours)) % num_colours
    return np.tile(one_period.astype(dtype), row_size // num_colours)


class _Colouring:
    """A colouring under repair. Nodes are ``("class", c)`` or ``("row", r)``; row M is the tail."""

    def __init__(self, layout: Layout, num_colours: int, rng: np.random.Generator) -> None:
        self.layout = layout
        self.rng = rng
        self.num_rows = layout.num_rows
        self.num_classes = len(layout.starts_C1) - 1
        self.kept_P = _start_colours(layout.num_rows, row_size=layout.row_size, num_colours=num_colours)
        self.tail_T = np.zeros(int(layout.tail_starts_C1[-1]), dtype=self.kept_P.dtype)
        self.tail_class_T = np.repeat(np.arange(self.num_classes), np.diff(layout.tail_starts_C1))
        class_P = np.repeat(np.arange(self.num_classes), np.diff(layout.starts_C1))
        cells = np.bincount(class_P * num_colours + self.kept_P, minlength=self.num_classes * num_colours)
        self.class_counts_CR = cells.reshape(self.num_classes, num_colours)
        self.tail_counts_R = np.zeros(num_colours, dtype=np.int64)

    def colour_tail(self) -> None:
        """Gives the tail's edges of each class the colours of which the class has fewest, then the tail row."""
        num_colours = len(self.tail_counts_R)
        for c in np.flatnonzero(np.diff(self.layout.tail_starts_C1)):
            first, end = self.layout.tail_starts_C1[c : c + 2]
            order_R = np.lexsort((self.rng.random(num_colours), self.tail_counts_R, self.class_counts_CR[c]))
            colours = np.resize(order_R, end - first)
            self.tail_T[first:end] = colours
            added_R = np.bincount(colours, minlength=num_colours)
            self.class_counts_CR[c] += added_R
            self.tail_counts_R += added_R

    def balance(self) -> None:
        """Repairs every class and the tail row with more than one edge between its colours."""
        for c in np.flatnonzero(np.ptp(self.class_counts_CR, axis=1) > 1):
            counts_R = self.class_counts_CR[c]
            while np.ptp(counts_R) > 1:
                self._trail(int(c), more=int(counts_R.argmax()), less=int(counts_R.argmin()), at_class=True)
        counts_R = self.tail_counts_R
        while np.ptp(counts_R) > 1:
            # Arcs leave a row where they enter a class: for a row, the colours change roles.
            more, less = int(counts_R.argmin()), int(counts_R.argmax())
            self._trail(self.num_rows, more=more, less=less, at_class=False)

    def _trail(self, node: int, *, more: int, less: int, at_class: bool) -> None:
        self._count(node, more=more, less=less, at_class=at_class, sign=-1)
        used_rows: dict[int, list[int]] = {}
        used_classes: dict[int, list[int]] = {}
        while True:
            if at_class:
                row, c = self._next_row(node, more=more, less=less, used=used_rows.get(node, [])), node
            else:
                row, c = node, self._next_class(node, more=more, less=less, used=used_classes.get(node, []))
            used_rows.setdefault(c, []).append(row)
            used_classes.setdefault(row, []).append(c)
            self._flip(row, c, old=more if at_class else less, new=less if at_class else more)
            node, at_class = (row, False) if at_class else (c, True)
            if self._surplus(node, more=more, less=less, at_class=at_class) < 0:
                self._count(node, more=more, less=less, at_class=at_class, sign=1)
                return

    def _next_row(self, c: int, *, more: int, less: int, used: list[int]) -> int:
        excess = self._row_counts(c, more) - self._row_counts(c, less)
        excess[used] = 0
        tail = self.num_rows
        if excess[tail] > 0 and self._surplus(tail, more=more, less=less, at_class=False) < 0:
            return tail
        return int(self.rng.choice(np.flatnonzero(excess > 0)))

    def _next_class(self, row: int, *, more: int, less: int, used: list[int]) -> int:
        excess = self._class_counts(row, less) - self._class_counts(row, more)
        excess[used] = 0
        candidates = np.flatnonzero(excess > 0)
        ends = candidates[self.class_counts_CR[candidates, more] < self.class_counts_CR[candidates, less]]
        return int(self.rng.choice(ends if len(ends) else candidates))

    def _surplus(self, node: int, *, more: int, less: int, at_class: bool) -> int:
        """Arcs out minus arcs in."""
        if at_class:
            return int(self.class_counts_CR[node, more]) - int(self.class_counts_CR[node, less])
        if node < self.num_rows:
            return 0
        return int(self.tail_counts_R[less]) - int(self.tail_counts_R[more])

    def _count(self, node: int, *, more: int, less: int, at_class: bool, sign: int) -> None:
        counts_R = self.class_counts_CR[node] if at_class else self.tail_counts_R
        gains = more if at_class else less
        loses = less if at_class else more
        counts_R[gains] += sign
        counts_R[loses] -= sign

    def _row_counts(self, c: int, colour: int) -> Ints:
        first, end = self.layout.starts_C1[c : c + 2]
        rows = (np.flatnonzero(self.kept_P[first:end] == colour) + first) % max(self.num_rows, 1)
        counts = np.bincount(rows, minlength=self.num_rows + 1)
        tail_first, tail_end = self.layout.tail_starts_C1[c : c + 2]
        counts[self.num_rows] = np.count_nonzero(self.tail_T[tail_first:tail_end] == colour)
        return counts

    def _class_counts(self, row: int, colour: int) -> Ints:
        if row == self.num_rows:
            classes = self.tail_class_T[self.tail_T == colour]
        else:
            p = row + self.num_rows * np.flatnonzero(self.kept_P[row :: self.num_rows] == colour)
            classes = np.searchsorted(self.layout.starts_C1, p, side="right") - 1
        return np.bincount(classes, minlength=self.num_classes)

    def _flip(self, row: int, c: int, *, old: int, new: int) -> None:
        if row == self.num_rows:
            first, end = self.layout.tail_starts_C1[c : c + 2]
            pair = self.tail_T[first:end]
        else:
            first, end = (int(start) for start in self.layout.starts_C1[c : c + 2])
            pair = self.kept_P[first + (row - first) % self.num_rows : end : self.num_rows]
        pair[np.flatnonzero(pair == old)[0]] = new
