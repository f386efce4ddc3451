"""Compare two runs bit by bit: losses, dense parameters, rows and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.arrays import Array
from schemas.errors import SchemaError
from schemas.run_log import METRICS, read_metrics
from trainer.checkpoint.format import RowPart, RowsAndRecords, newest
from trainer.checkpoint.load import dense_of, newest_checkpoint
from trainer.checkpoint.manifest import CheckpointManifest, read_checkpoint_manifest
from trainer.stores.api import Records

# Whether two runs are equal bit by bit: losses, dense parameters, rows and optimizer state.
#
# However rows were kept (all in memory, cached, in files, in store processes) and however often a
# run was stopped and resumed, it must leave the same bits.


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was compared, and the first difference."""

    num_steps: int
    """Steps whose losses were compared."""
    num_tensors: int
    """Dense parameters and their optimizer state."""
    num_rows: int
    """Rows of all tables."""
    difference: str | None
    """Where the first difference is and what stands there; None when all bits are equal."""


def compare_runs(one: Path, other: Path) -> Comparison:
    """Compare the losses of two runs and their newest checkpoints.

    Args:
        one: run folder.
        other: run folder.

    Raises:
        SchemaError: a folder holds no run with a checkpoint.
    """
    losses, theirs = (_losses(run) for run in (one, other))
    a, b = (_newest(run) for run in (one, other))
    tensors = [dense_of(checkpoint) for checkpoint in (a, b)]
    manifests = [read_checkpoint_manifest(checkpoint) for checkpoint in (a, b)]
    tables = [sorted(manifest.parts) for manifest in manifests]
    found = _of_losses(losses, theirs)
    if found is None and a.name != b.name:
        found = f"newest checkpoint: step {int(a.name)} and step {int(b.name)}"
    found = found or _of_tensors(*tensors)
    if found is None and tables[0] != tables[1]:
        found = f"tables: {', '.join(tables[0])} and {', '.join(tables[1])}"
    num_rows = 0
    for table in tables[0]:
        if found is None:
            streams = [_rows_of(*each, table) for each in zip((a, b), manifests, strict=True)]
            count, found = _of_rows(table, *streams)
            num_rows += count
    return Comparison(
        num_steps=min(len(losses), len(theirs)),
        num_tensors=len(tensors[0]),
        num_rows=num_rows,
        difference=found,
    )


def _losses(run: Path) -> list[float]:
    if not (run / METRICS).is_file():
        raise SchemaError("run must exist, got none; train first", file=str(run))
    return [metric.loss for metric in read_metrics(run / METRICS)]


def _newest(run: Path) -> Path:
    found = newest_checkpoint(run)
    if found is None:
        raise SchemaError("run must have a checkpoint, got none; train again", file=str(run))
    return found


def _of_losses(one: list[float], other: list[float]) -> str | None:
    for step, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"loss of step {step}: {a!r} and {b!r}"
    return None if len(one) == len(other) else f"steps: {len(one)} and {len(other)}"


def _of_tensors(one: dict[str, Array], other: dict[str, Array]) -> str | None:
    for name in sorted(one.keys() | other.keys()):
        if _bits(one.get(name)) != _bits(other.get(name)):
            return f"dense {name}: other bits"
    return None


def _bits(value: Array | None) -> object:
    return value if value is None else (value.dtype, value.shape, value.tobytes())


def _rows_of(
    checkpoint: Path, manifest: CheckpointManifest, table: str
) -> Iterator[RowsAndRecords]:
    parts = [RowPart(checkpoint.parent / part) for part in manifest.parts[table]]
    return newest([part.pieces() for part in parts])


def _of_rows(
    table: str, one: Iterator[RowsAndRecords], other: Iterator[RowsAndRecords]
) -> tuple[int, str | None]:
    """Return how many rows are equal, and what comes then."""
    count = 0
    for (rows, records), (others, theirs) in _aligned(one, other):
        pairs = {
            "rows": (rows, others),
            "values": (records.values, theirs.values),
            "state": (records.state, theirs.state),
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


def _aligned(
    one: Iterator[RowsAndRecords], other: Iterator[RowsAndRecords]
) -> Iterator[tuple[RowsAndRecords, RowsAndRecords]]:
    """Yield pieces of equally many rows while both have some, then what one has more."""
    a, b = _more(None, one), _more(None, other)
    while a is not None and b is not None:
        count = min(len(a[0]), len(b[0]))
        yield _part(a, slice(0, count)), _part(b, slice(0, count))
        a, b = _more(_part(a, slice(count, None)), one), _more(_part(b, slice(count, None)), other)
    last = a or b
    if last is not None:
        none = _part(last, slice(0, 0))
        yield a or none, b or none


def _more(piece: RowsAndRecords | None, stream: Iterator[RowsAndRecords]) -> RowsAndRecords | None:
    """Return a piece that has rows."""
    while piece is None or not len(piece[0]):
        piece = next(stream, None)
        if piece is None:
            return None
    return piece


def _part(piece: RowsAndRecords, part: slice) -> RowsAndRecords:
    rows, records = piece
    return rows[part], Records(records.values[part], records.state[part])


def _bytes_of(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Return the bytes of each row, so that zeros of two signs differ."""
    width = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(len(array), width)
