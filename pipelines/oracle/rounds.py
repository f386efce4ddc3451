"""Work on tables in rounds: what a round leaves on disk, every task of the next one may read.

plan -> tasks -> results -> tasks -> results -> ... -> value

Tasks of all tables spread over all workers; a table goes on when all tasks of
its round are done. Tasks write whole files that depend on nothing but the
plan, so that one that runs twice, or elsewhere, leaves the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Round:
    """One round.

    Attributes:
        name: of the Beam stage.
        tasks: from a plan and the results of the round before, in the order of its tasks, to the
            tasks; at least one.
        work: does a task.
    """

    name: str
    tasks: Callable[[Any, list[Any]], Iterable[Any]]
    work: Callable[[Any, Any], Any]


def run_rounds(plan: Any, rounds: Sequence[Round]) -> list[Any]:
    """Do all rounds of a plan here, one task after the other; return the results of the last."""
    results: list[Any] = []
    for each in rounds:
        results = [each.work(plan, task) for task in each.tasks(plan, results)]
    return results
