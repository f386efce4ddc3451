"""What transforms learn, on Beam: contributions are combined by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam

from pipelines.learned.files import LEARNED
from pipelines.learned.learn import merged, settle, shrink, with_partial
from pipelines.learned.partials import Partial
from schemas.job import DataConfig


class MergePartials(beam.CombineFn):
    """Adds contributions of one key; several are merged at once."""

    def create_accumulator(self) -> list[Partial]:
        """Return nothing yet."""
        return []

    def add_input(self, mutable_accumulator: list[Partial], element: Partial) -> list[Partial]:
        """Add one contribution."""
        return with_partial(mutable_accumulator, element)

    def merge_accumulators(self, accumulators: Iterable[list[Partial]]) -> list[Partial]:
        """Merge what is there into one."""
        return merged([part for parts in accumulators for part in parts])

    def compact(self, accumulator: list[Partial]) -> list[Partial]:
        """Merge before the accumulator is sent."""
        return merged(accumulator)

    def extract_output(self, accumulator: list[Partial]) -> Partial:
        """Return the sum."""
        return merged(accumulator)[0]


class _Shrink(beam.DoFn):
    def __init__(self, root: Path, data: DataConfig) -> None:
        self.root, self.data = root, data

    def process(self, element: tuple[str, Partial]) -> Iterator[tuple[str, Partial | str]]:
        key, partial = element
        yield key, shrink(self.root, self.data, key, partial)


class _Settle(beam.DoFn):
    """Turns all sums into files, once."""

    def __init__(self, root: Path, data: DataConfig, base: Mapping[str, str]) -> None:
        self.root, self.data, self.base = root, data, base

    def process(self, partials: list[tuple[str, Any]]) -> Iterator[dict[str, str]]:
        yield settle(self.root / LEARNED, dict(partials), self.data, self.base)


@dataclass  # not frozen: Beam assigns to its transforms
class Learn(beam.PTransform):
    """Contributions by key to one mapping of files, path to sha256, below the segment's scratch."""

    root: Path
    data: DataConfig
    base: Mapping[str, str]

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Add up by key, keep what can become an entry, write once."""
        return (
            input_or_inputs
            | "add up" >> beam.CombinePerKey(MergePartials())
            | "shrink" >> beam.ParDo(_Shrink(self.root, self.data))
            | "all sums" >> beam.combiners.ToList()
            | "settle" >> beam.ParDo(_Settle(self.root, self.data, self.base))
        )
