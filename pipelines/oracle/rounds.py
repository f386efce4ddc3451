"""Work on tables in rounds: what a round leaves on disk, every task of the next one may read.

plan -> tasks -> results -> tasks -> results -> ... -> value

Tasks of all tables spread over all workers; a table goes on when all tasks of
its round are done. Tasks write whole files that depend on nothing but the
plan, so that one that runs twice, or elsewhere, leaves the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam

from pipelines.beam.memory import keep_freed_memory


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


class _Plan(beam.DoFn):
    def __init__(self, each: Round) -> None:
        self.each = each

    def process(self, element: tuple[str, Iterable[Any]]) -> Iterator[Any]:
        key, done = element
        found = sorted(done, key=lambda d: d[1])
        plan = found[0][0]
        for index, task in enumerate(self.each.tasks(plan, [result for _, _, result in found])):
            yield key, plan, index, task


class _Work(beam.DoFn):
    def __init__(self, each: Round) -> None:
        self.each = each

    def setup(self) -> None:
        keep_freed_memory()

    def process(self, element: tuple[str, Any, int, Any]) -> Iterator[tuple[str, Any]]:
        key, plan, index, task = element
        yield key, (plan, index, self.each.work(plan, task))


def _begin(key: str, plan: Any) -> tuple[str, list[Any]]:
    return key, [(plan, 0, None)]


class _OneByOne(beam.DoFn):
    def __init__(self, rounds: Sequence[Round]) -> None:
        self.rounds = rounds

    def process(self, element: tuple[str, Any]) -> Iterator[tuple[str, list[Any]]]:
        key, plan = element
        results = run_rounds(plan, self.rounds)
        yield key, [(plan, index, result) for index, result in enumerate(results)]


class InRounds(beam.PTransform):
    """Do rounds for many plans at once: (key, plan) to (key, [(plan, index, result), ...])."""

    def __init__(self, rounds: Sequence[Round], spread: bool) -> None:
        """Take the rounds in order.

        Args:
            rounds: at least one.
            spread: whether tasks spread over workers. If not, one worker does all of a plan, and
                the pipeline is spared the stages, which cost a small build a second.
        """
        super().__init__()
        self.rounds, self.spread = rounds, spread

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Add the stages of every round."""
        if not self.spread:
            return input_or_inputs | "one by one" >> beam.ParDo(_OneByOne(self.rounds))
        done = input_or_inputs | "begin" >> beam.MapTuple(
            lambda key, plan: (key, [(plan, 0, None)])
        )
        for each in self.rounds:
            done = (
                done
                | f"plan {each.name}" >> beam.ParDo(_Plan(each))
                | f"spread {each.name}" >> beam.Reshuffle()
                | each.name >> beam.ParDo(_Work(each)).with_output_types(tuple[str, Any])
                | f"all of {each.name}" >> beam.GroupByKey()
            )
        return done
