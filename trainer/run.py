"""The folder of a run.

Its identity, the lines of committed steps, and the check that each sample was trained exactly
once.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from schemas.config.job import TableConfig
from schemas.config.train import TrainConfig
from schemas.dataset import Dataset, verify_version
from schemas.errors import SchemaError
from schemas.files import replace_bytes
from schemas.layout import BLOCKS, JOB, SCHEMA, TRAIN
from schemas.manifest import canonical_json
from schemas.run_log import (
    LEDGER,
    METRICS,
    RUN_FILE,
    SPLITS,
    SUMMARY,
    LedgerEntry,
    RunSummary,
    StepMetric,
    read_lines,
    read_metrics,
    to_line,
)

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
            "block": segment.block_ids[chosen],
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
            "a ledger entry",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What must be equal for a run to be continued."""

    dataset: Mapping[str, Any]
    """What its columns and tables mean; indexes may come and go."""
    segments: tuple[str, ...]
    """Hash of the manifest of each segment; of a run that follows the pipeline, those so far."""
    closed: bool
    """Whether no segment may follow: the dataset said so, or the run does not follow it."""
    train: Mapping[str, Any]
    """The job's train section without checkpoints, stores, cache, limits and threads."""
    chosen: bool = False
    """Whether `segments` were chosen from those of the dataset, of which there may be others."""
    origin: Mapping[str, Any] | None = None
    """The run, checkpoint and segments that the run was started from (`warm_start.py`), if any."""


def identity_of(
    dataset: Dataset,
    config: TrainConfig,
    *,
    follows: bool,
    chosen: bool = False,
    origin: Mapping[str, Any] | None = None,
) -> RunIdentity:
    """Return what a run of this job on this dataset is."""
    m, train = dataset.manifest, asdict(config)
    for name in ("checkpoint", "stores", "cache", "num_threads"):
        del train[name]  # where rows lie, and for how long, changes no bit of them
    del train["limits"], train["follow"]  # nor does how long something may take
    # as they are read back: lists, and texts for what JSON has not
    same = json.loads(canonical_json({"dataset": _meaning_of(dataset), "train": train}))
    return RunIdentity(
        **same,
        segments=tuple(reference.manifest_sha256 for reference in m.segments),
        closed=m.finished or not follows,
        chosen=chosen,
        origin=origin,
    )


def _meaning_of(dataset: Dataset) -> dict[str, Any]:
    return {
        "features": {f.name: f.role for f in dataset.features.features if f.role != "kept"},
        "tables": {name: _of_table(table) for name, table in dataset.job.data.tables.items()},
    }


def _of_table(table: TableConfig) -> dict[str, Any]:
    """Return what makes ids to rows: more rows of an identity table leave those that are there."""
    found = {"features": table.features, "rows": table.rows}
    return found if table.rows == "identity" else {**found, "num_rows": table.num_rows}


def has_run(run: Path) -> bool:
    """Tell whether a folder holds a run."""
    return (run / RUN_FILE).is_file()


def start_run(
    run: Path,
    job: Path,
    dataset: Dataset,
    config: TrainConfig,
    *,
    follows: bool = False,
    chosen: bool = False,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """Make the folder of a new run.

    Args:
        run: run folder.
        job: job file.
        dataset: open dataset.
        config: train section of the job.
        follows: whether segments may still come.
        chosen: whether its segments were chosen from those of the dataset.
        origin: what it begins with.

    Raises:
        SchemaError: the folder holds a run already.
    """
    refuse_run(run)
    run.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(job, run / JOB)
    for name in (METRICS, LEDGER):
        (run / name).write_text("", encoding="utf-8")
    write_dataset(run, dataset, config, follows=follows, chosen=chosen, origin=origin)


def refuse_run(run: Path) -> None:
    """Refuse a folder that holds a run.

    Raises:
        SchemaError: it does.
    """
    if has_run(run):
        raise SchemaError(
            "output must hold no run, got one; use --resume or another folder", file=str(run)
        )


def write_dataset(
    run: Path,
    dataset: Dataset,
    config: TrainConfig,
    *,
    follows: bool,
    chosen: bool = False,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """Write what the run has to train, and then what it is: again when the dataset has grown."""
    write_expected(run, dataset, config.epochs)
    schema = verify_version(dataset.directory / SCHEMA, dataset.manifest.schema_sha256)
    replace_bytes(run / SCHEMA, schema.read_bytes())
    found = identity_of(dataset, config, follows=follows, chosen=chosen, origin=origin)
    replace_bytes(run / RUN_FILE, canonical_json(asdict(found)).encode())


def read_identity(run: Path) -> RunIdentity:
    """Return what a run is.

    Raises:
        SchemaError: the folder holds no run, or its identity is damaged.
    """
    path = run / RUN_FILE
    if not has_run(run):
        raise SchemaError("run must exist, got none; train first", file=str(run))
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        return RunIdentity(**{**body, "segments": tuple(body["segments"])})
    except (ValueError, TypeError, KeyError) as error:
        raise SchemaError(
            "identity must be JSON with dataset and train, got other content; restore it",
            file=str(path),
        ) from error


def check_run(run: Path, dataset: Dataset, config: TrainConfig, *, follows: bool = False) -> None:
    """Refuse to go on with a run of another job or dataset.

    Args:
        run: run folder.
        dataset: as it is now.
        config: train section of the job.
        follows: whether segments may have come since, after those of the run.

    Raises:
        SchemaError: the folder holds no run, or another one.
    """
    path, found = run / RUN_FILE, read_identity(run)
    wanted = identity_of(dataset, config, follows=follows)
    for field in ("dataset", "train"):
        different = first_difference(getattr(found, field), getattr(wanted, field), field)
        if different is not None:
            name, old, new = different
            raise SchemaError(
                f"{name} must be that of the run, got {new!r} for {old!r}; "
                "use the job and the dataset that it was started with",
                file=str(path),
            )
    _check_segments(path, found, wanted, follows=follows, epochs=config.epochs)


def check_meaning(path: Path, found: RunIdentity, dataset: Dataset) -> None:
    """Refuse a dataset whose columns or tables mean something else than those of a run.

    Args:
        path: of the run's identity, for the error.
        found: what the run is.
        dataset: open dataset; which segments it has does not matter.

    Raises:
        SchemaError: the first difference, by name, with both sides.
    """
    meaning = json.loads(canonical_json(_meaning_of(dataset)))
    different = first_difference(found.dataset, meaning, "dataset")
    if different is not None:
        name, old, new = different
        raise SchemaError(
            f"{name} must be that of the run, got {new!r} for {old!r}; use a dataset of the same "
            "columns and tables",
            file=str(path),
        )


def first_difference(old: Any, new: Any, name: str) -> tuple[str, Any, Any] | None:
    """Return the name of the first value that differs in nested mappings, and both values.

    Example:
        >>> first_difference({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"d": 2}}, "x")
        ('x.b.c', 2, None)
    """
    if old == new:
        return None
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return name, old, new
    for key in [*old, *new]:
        found = first_difference(old.get(key), new.get(key), f"{name}.{key}")
        if found is not None:
            return found
    return None


def _check_segments(
    path: Path, found: RunIdentity, wanted: RunIdentity, *, follows: bool, epochs: int
) -> None:
    old, new = found.segments, wanted.segments
    for place, (theirs, ours) in enumerate(zip_longest(old, new[: len(old)])):
        if theirs != ours:
            raise SchemaError(
                f"dataset must begin with the segments of the run, got segment={str(ours)[:12]} "
                f"for {theirs[:12]} at place {place}; use the one it was started with",
                file=str(path),
            )
    if len(new) == len(old):
        return
    if found.closed and epochs > 1:
        raise SchemaError(
            f"dataset must not grow after its first epoch, got {len(new)} segments for the "
            f"{len(old)} that it was closed with; train again",
            file=str(path),
        )
    if not follows:
        raise SchemaError(
            f"dataset must be that of the run, got {len(new)} segments for {len(old)}; "
            "use --follow to go on with those that came since",
            file=str(path),
        )


def cut_run(run: Path, train_step: int) -> None:
    """Drop the lines of steps from `train_step` on: they will be trained again."""
    for name in (METRICS, LEDGER, SPLITS):
        exists = (run / name).is_file()
        if name == SPLITS and not exists:
            continue
        lines = (run / name).read_bytes().splitlines(keepends=True) if exists else []
        kept = [line for line in lines if _step_of(line) < train_step]
        replace_bytes(run / name, b"".join(kept))


def _step_of(line: bytes) -> float:
    """Return the step of a line; of a torn or unreadable one, that of none that is kept."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, TypeError, KeyError):
        return math.inf


def write_summary(run: Path, summary: RunSummary) -> None:
    """Write `summary.json`."""
    replace_bytes(run / SUMMARY, f"{to_line(summary)}\n".encode())


class RunLog:
    """Appends the two lines of each committed step."""

    def __init__(self, run: Path) -> None:
        """Remember the folder; nothing is opened yet."""
        self._run = run
        self._files: tuple[TextIO, TextIO] | None = None

    def __enter__(self) -> RunLog:
        """Open both files at their ends."""
        metrics = (self._run / METRICS).open("a", encoding="utf-8")
        self._files = (metrics, (self._run / LEDGER).open("a", encoding="utf-8"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close both files."""
        for file in self._files or ():
            # what could not be written is tried once more; the error that ends the run is told
            with suppress(*([OSError] if error else [])):
                file.close()

    def commit(self, metric: StepMetric, entry: LedgerEntry) -> None:
        """Append a step; other processes see it at once.

        Raises:
            SchemaError: the disk is full.
        """
        assert self._files is not None, "a run log is open while steps are committed"
        for file, record in zip(self._files, (metric, entry), strict=True):
            try:
                file.write(f"{to_line(record)}\n")
                file.flush()
            except OSError as failed:
                raise SchemaError(
                    f"disk must have room for the line of a step, got {failed.strerror}; free some "
                    "and train on with --resume",
                    file=file.name,
                ) from failed
