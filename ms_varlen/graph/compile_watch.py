"""Counts compiled graphs: none is compiled unnoticed, and a storm of them stops.

A count costs a `len`.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from ms_varlen.errors import ShapesError

logger = logging.getLogger("ms_varlen")


class CompiledCell(Protocol):
    """The part of `mindspore.nn.Cell` that is looked at: one entry per graph compiled; empty in PyNative mode."""

    @property
    def compile_cache(self) -> set[str]: ...


def check_graphs(expected: Mapping[str, int], max_graphs: int) -> None:
    """Refuse more graphs than are allowed, before any is compiled.

    Args:
        expected: role -> predicted number of graphs.
        max_graphs: the most graphs allowed, all roles together (`graph.max_graphs`).
    Raises:
        ShapesError: more graphs predicted than allowed.
    """
    predicted = sum(expected.values())
    if predicted > max_graphs:
        roles = ", ".join(f"{role} {count}" for role, count in expected.items())
        raise ShapesError(
            f"the predicted number of graphs must be <= graph.max_graphs ({max_graphs}), got {predicted} "
            f"({roles}); declare fewer sizes under shapes or raise graph.max_graphs",
            "SHAPE-RECOMPILE",
        )


class CompileWatch:
    """Compares the graphs that were compiled, by role, with those predicted.

    Args:
        cells: role -> its cells, e.g. ``{"train": (...,), "apply": (...,), "eval": (...,)}``.
        expected: role -> predicted number of graphs.
        max_graphs: the most graphs allowed, all roles together (`graph.max_graphs`).
    Raises:
        ShapesError: more graphs predicted than allowed; nothing was compiled yet.
    """

    def __init__(self, cells: Mapping[str, Sequence[CompiledCell]], expected: Mapping[str, int], max_graphs: int):
        if cells.keys() != expected.keys():
            raise ShapesError(f"roles of expected must be those of cells ({sorted(cells)}), got {sorted(expected)}")
        check_graphs(expected, max_graphs)
        self.predicted = sum(expected.values())
        self.cells = dict(cells)
        self.expected = dict(expected)
        self.max_graphs = max_graphs
        self._seen = self.counts()

    def counts(self) -> dict[str, int]:
        """Graphs compiled so far, by role; all 0 in PyNative mode."""
        return {role: sum(len(cell.compile_cache) for cell in cells) for role, cells in self.cells.items()}

    def check(self, shape: str) -> dict[str, int]:
        """Logs every graph compiled since the last look: as normal when predicted, else as a warning.

        Args:
            shape: what was just compiled or run, e.g. ``T=4096``.
        Returns:
            The counts, by role.
        Raises:
            ShapesError: more graphs than `max_graphs` were compiled.
        """
        counts = self.counts()
        for role, count in counts.items():
            for number in range(self._seen[role] + 1, count + 1):
                self._seen[role] = number
                self._report(role, number, shape)
        self._stop_a_storm(counts, shape)
        return counts

    def _stop_a_storm(self, counts: Mapping[str, int], shape: str) -> None:
        compiled = sum(counts.values())
        if compiled > self.max_graphs:
            roles = ", ".join(f"{role} {count}" for role, count in counts.items())
            raise ShapesError(
                f"the number of compiled graphs must be <= graph.max_graphs ({self.max_graphs}), got {compiled} "
                f"({roles}; {self.predicted} were predicted), the last for {shape}; use shapes.kind=range, one graph "
                "for all sizes, or a larger shapes.divisor; raise graph.max_graphs if each of these sizes is meant",
                "SHAPE-RECOMPILE",
            )

    def _report(self, role: str, number: int, shape: str) -> None:
        if number <= self.expected[role]:
            total = sum(self._seen.values())
            logger.info("graph %d of %d (%s), %s, compiled, normal", total, self.predicted, role, shape)
            return
        logger.warning(
            "%s graph %d compiled where %d were predicted: the inputs of %s fit no declared shape; "
            "each such shape costs seconds and memory, see shapes in the recipe",
            role,
            number,
            self.expected[role],
            shape,
        )
