"""Compare two runs bit by bit: losses, dense parameters, rows and optimizer state.

These bits depend neither on the kind of store and cache nor on interruptions of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import Array
from presage.schemas.errors import SchemaError
from presage.schemas.run.records import METRICS, read_metrics
from presage.trainer.checkpoint.files import CheckpointManifest, read_checkpoint_manifest
from presage.trainer.checkpoint.format import read_parts
from presage.trainer.checkpoint.load import read_dense, require_checkpoint
from presage.trainer.stores.store import RowsAndRecords, select


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The number of compared values, and the first difference."""

    num_steps: int
    """Steps whose losses were compared."""
    num_tensors: int
    """Dense parameters and their optimizer state."""
    num_rows: int
    """Rows of all tables."""
    difference: str | None
    """The first difference, with both values; None if all bits are equal."""


def compare_runs(one: Path, other: Path) -> Comparison:
    """Compare the losses of two runs and their newest checkpoints.

    Raises:
        SchemaError: a folder holds no run with a checkpoint.
    """
    losses, other_losses = (_losses(run) for run in (one, other))
    a, b = (require_checkpoint(run) for run in (one, other))
    tensors = [read_dense(checkpoint) for checkpoint in (a, b)]
    manifests = [read_checkpoint_manifest(checkpoint) for checkpoint in (a, b)]
    tables = [sorted(manifest.parts) for manifest in manifests]
    difference = _compare_losses(losses, other_losses)
    if difference is None and a.name != b.name:
        difference = f"newest checkpoint: step {int(a.name)} and step {int(b.name)}"
    difference = difference or _compare_tensors(*tensors)
    if difference is None and tables[0] != tables[1]:
        difference = f"tables: {', '.join(tables[0])} and {', '.join(tables[1])}"
    num_rows = 0
    for table in tables[0]:
        if difference is None:
            streams = [_rows_of(*each, table) for each in zip((a, b), manifests, strict=True)]
            count, difference = _compare_rows(table, *streams)
            num_rows += count
    return Comparison(
        num_steps=min(len(losses), len(other_losses)),
        num_tensors=len(tensors[0]),
        num_rows=num_rows,
        difference=difference,
    )


def _losses(run: Path) -> list[float]:
    if not (run / METRICS).is_file():
        raise SchemaError("found no run of presage train; train first", file=str(run))
    return [metric.loss for metric in read_metrics(run / METRICS)]


def _compare_losses(one: list[float], other: list[float]) -> str | None:
    for step, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"loss of step {step}: {a!r} and {b!r}"
    return None if len(one) == len(other) else f"steps: {len(one)} and {len(other)}"


def _compare_tensors(one: dict[str, Array], other: dict[str, Array]) -> str | None:
    for name in sorted(one.keys() | other.keys()):
        if _bits(one.get(name)) != _bits(other.get(name)):
            return f"dense {name}: other bits"
    return None


def _bits(value: Array | None) -> object:
    return value if value is None else (value.dtype, value.shape, value.tobytes())


def _rows_of(
    checkpoint: Path, manifest: CheckpointManifest, table: str
) -> Iterator[RowsAndRecords]:
    return read_parts(checkpoint.parent / part for part in manifest.parts[table])


def _compare_rows(
    table: str, one: Iterator[RowsAndRecords], other: Iterator[RowsAndRecords]
) -> tuple[int, str | None]:
    """Return the number of equal rows before the first difference, and that difference."""
    count = 0
    for (rows, records), (other_rows, other_records) in _align(one, other):
        pairs = {
            "rows": (rows, other_rows),
            "values": (records.values, other_records.values),
            "state": (records.state, other_records.state),
        }
        for name, (a, b) in pairs.items():
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                return (
                    count,
                    f"{name} of table {table}: {a.dtype} {a.shape} and {b.dtype} {b.shape}",
                )
            unequal = np.argwhere(_bytes_of(a) != _bytes_of(b))
            if len(unequal):
                at, byte = unequal[0].tolist()
                column = byte // a.dtype.itemsize
                values = a[at].reshape(-1)[column].item(), b[at].reshape(-1)[column].item()
                return count, (
                    f"{name} of table {table}, row {rows[at]}, column {column}: "
                    f"{values[0]!r} and {values[1]!r}"
                )
        count += len(rows)
    return count, None


def _align(
    one: Iterator[RowsAndRecords], other: Iterator[RowsAndRecords]
) -> Iterator[tuple[RowsAndRecords, RowsAndRecords]]:
    """Yield pairs of chunks with equal numbers of rows, then the next rows of the longer one."""
    a = b = None
    while True:
        a, b = _fill(a, one), _fill(b, other)
        if a is None or b is None:
            break
        count = min(len(a[0]), len(b[0]))
        yield select(a, slice(0, count)), select(b, slice(0, count))
        a, b = select(a, slice(count, None)), select(b, slice(count, None))
    last = a or b
    if last is not None:
        empty = select(last, slice(0, 0))
        yield a or empty, b or empty


def _fill(chunk: RowsAndRecords | None, stream: Iterator[RowsAndRecords]) -> RowsAndRecords | None:
    """Return the chunk, or the next one with rows if it has none."""
    while chunk is None or not len(chunk[0]):
        chunk = next(stream, None)
        if chunk is None:
            return None
    return chunk


def _bytes_of(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Return the bytes of each row, so that zeros of two signs differ."""
    width = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(len(array), width)
