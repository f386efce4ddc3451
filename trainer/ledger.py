"""What was trained: one line per committed step, and the proof that nothing is missing or twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from schemas.dataset import Dataset
from schemas.errors import SchemaError
from schemas.events import LEDGER, METRICS, LedgerEntry, read_lines, read_metrics
from schemas.layout import BLOCKS, TRAIN

_RUN_BLOCKS = pa.schema(
    [
        pa.field("segment", pa.string()),
        pa.field("block", pa.int64()),
        pa.field("num_samples", pa.int64()),
    ]
)


def write_expected(run: Path, dataset: Dataset, epochs: int) -> None:
    """Keep beside the ledger which blocks the run has to train, and how often.

    Args:
        run: run folder.
        dataset: open dataset.
        epochs: passes over the training range.
    """
    tables: list[pa.Table] = []
    for segment in dataset.segments:
        chosen = segment.positions(TRAIN)
        columns = {
            "segment": pa.array([segment.manifest.id] * len(chosen), pa.string()),
            "block": segment.block_names[chosen],
            "num_samples": segment.column("num_samples")[chosen],
        }
        tables.append(pa.table(columns, _RUN_BLOCKS))
    table = pa.concat_tables(tables).replace_schema_metadata({"epochs": str(epochs)})
    partial = run / f".{BLOCKS}.partial"  # a run that follows the pipeline writes it again
    with partial.open("wb") as file:
        pq.write_table(table, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(run / BLOCKS)


def read_ledger(path: Path) -> list[LedgerEntry]:
    """Read `ledger.jsonl`; a torn last line is left out.

    Raises:
        SchemaError: the file is missing, or a line other than the last is no entry.
    """
    try:
        return read_lines(
            path,
            lambda body: LedgerEntry(**{**body, "blocks": tuple(body["blocks"])}),
            lambda line, _: f"line must be a ledger entry, got {line!r}; restore the file",
        )
    except OSError as error:
        raise SchemaError("ledger must exist, got none; this is no run", file=str(path)) from error


def steps_with_lines(run: Path) -> tuple[int, Path]:
    """Return how many steps from 0 on have all their lines, and the file that has no more.

    A step has its lines where the metrics have one, and the ledger has as many samples of it.
    """
    samples = dict[int, int]()
    for step, num_samples in _counted_lines(run / LEDGER):
        samples[step] = samples.get(step, 0) + num_samples
    count = 0
    for step, num_samples in _counted_lines(run / METRICS):
        if step != count:
            break
        if samples.get(step) != num_samples:
            return count, run / LEDGER
        count += 1
    return count, run / METRICS


def _counted_lines(path: Path) -> Iterator[tuple[int, int]]:
    """Yield step and samples of each line up to the first that is torn or unreadable."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                body = json.loads(line)
                counts = int(body["step"]), int(body["num_samples"])
            except (ValueError, TypeError, KeyError):
                return
            if not line.endswith(b"\n"):
                return
            yield counts


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReport:
    """What `verify RUN` found."""

    num_steps: int
    """Committed steps."""
    num_samples: int
    """Samples in them."""
    num_expected_samples: int
    """Samples of every epoch."""
    problems: tuple[str, ...]
    """One line each; empty when every sample of every epoch was trained exactly once."""


def verify_run(run: Path) -> LedgerReport:
    """Count in the ledger how often each sample of each epoch was trained.

    Raises:
        SchemaError: the folder is no run, or its files are torn inside.
    """
    if not (run / BLOCKS).is_file():
        raise SchemaError("run must have blocks.parquet, got none; train first", file=str(run))
    expected = pq.read_table(run / BLOCKS)
    epochs = int(expected.schema.metadata[b"epochs"])
    entries = read_ledger(run / LEDGER)
    metrics = read_metrics(run / METRICS)
    steps = sorted({e.step for e in entries})
    problems = list(_counts(expected, epochs, entries))
    if steps != list(range(len(steps))):
        problems.append(f"steps must run from 0 without a hole, got {_hole(steps)} missing")
    if [m.step for m in metrics] != steps:
        problems.append(f"metrics must have one line per step, got {len(metrics)} for {len(steps)}")
    num_expected = epochs * int(expected["num_samples"].to_numpy().sum())
    num_samples = sum(e.num_samples for e in entries)
    if num_samples != num_expected:
        problems.append(f"ledger must add up to {num_expected} samples, got {num_samples}")
    return LedgerReport(
        num_steps=len(steps),
        num_samples=num_samples,
        num_expected_samples=num_expected,
        problems=tuple(problems),
    )


def _counts(expected: pa.Table, epochs: int, entries: Iterable[LedgerEntry]) -> Iterable[str]:
    """Yield one line per epoch in which some block was not trained exactly once."""
    place = {
        key: index
        for index, key in enumerate(
            zip(expected["segment"].to_pylist(), expected["block"].to_pylist(), strict=True)
        )
    }
    counts = np.zeros((epochs, len(place)), np.int64)
    unknown = 0
    for entry in entries:
        for block in entry.blocks:
            index = place.get((entry.segment, block))
            if index is None or not 0 <= entry.epoch < epochs:
                unknown += 1
            else:
                counts[entry.epoch, index] += 1
    if unknown:
        yield f"blocks must be of the training range, got {unknown} others"
    for epoch in range(epochs):
        yield from _uneven(counts[epoch], epoch)


def _uneven(counts: NDArray[np.int64], epoch: int) -> Iterable[str]:
    missing, repeated = int((counts == 0).sum()), int((counts > 1).sum())
    if missing or repeated:
        yield (
            f"epoch {epoch} must train each of {len(counts)} blocks once, "
            f"got {missing} never and {repeated} more than once"
        )


def _hole(steps: list[int]) -> int:
    return next(i for i, step in enumerate([*steps, -1]) if step != i)
