"""Whether two runs are equal bit by bit: losses, dense parameters, rows and optimizer state.

However rows were kept (all in memory, cached, in files, in store processes) and however often a
run was stopped and resumed, it must leave the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.events import METRICS, read_metrics
from trainer.checkpoint import DENSE, ROW_FILES, newest_checkpoint

_ROWS_AT_ONCE = 1 << 16


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
    tensors = [dict(_leaves("", _dense(checkpoint))) for checkpoint in (a, b)]
    tables = [sorted(p.name for p in checkpoint.iterdir() if p.is_dir()) for checkpoint in (a, b)]
    found = _of_losses(losses, theirs)
    if found is None and a.name != b.name:
        found = f"newest checkpoint: step {int(a.name)} and step {int(b.name)}"
    found = found or _of_tensors(*tensors)
    if found is None and tables[0] != tables[1]:
        found = f"tables: {', '.join(tables[0])} and {', '.join(tables[1])}"
    for table in tables[0]:
        found = found or _of_rows(table, a / table, b / table)
    return Comparison(
        num_steps=min(len(losses), len(theirs)),
        num_tensors=len(tensors[0]),
        num_rows=sum(len(_array(a / table, "rows")) for table in tables[0]),
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


def _dense(checkpoint: Path) -> object:
    return torch.load(checkpoint / DENSE, weights_only=True, map_location="cpu")


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield everything that nested dictionaries and lists hold, by its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{name}/{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _leaves(f"{name}/{index}", inner)
    else:
        yield name.lstrip("/"), value


def _of_losses(one: list[float], other: list[float]) -> str | None:
    for step, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return f"loss of step {step}: {a!r} and {b!r}"
    return None if len(one) == len(other) else f"steps: {len(one)} and {len(other)}"


def _of_tensors(one: dict[str, object], other: dict[str, object]) -> str | None:
    for name in sorted(one.keys() | other.keys()):
        if _bits(one.get(name)) != _bits(other.get(name)):
            return f"dense {name}: other bits"
    return None


def _bits(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, tuple(value.shape), value.reshape(-1).numpy().tobytes()


def _array(folder: Path, name: str) -> NDArray[np.generic]:
    return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)


def _of_rows(table: str, one: Path, other: Path) -> str | None:
    rows = _array(one, "rows")
    for name in ROW_FILES:
        a, b = _array(one, name), _array(other, name)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{name} of table {table}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
        for start in range(0, len(a), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            unequal = np.argwhere(_bytes_of(a[part]) != _bytes_of(b[part]))
            if len(unequal):
                row, byte = unequal[0].tolist()
                at, column = start + row, byte // a.dtype.itemsize
                values = a[at].reshape(-1)[column].item(), b[at].reshape(-1)[column].item()
                return (
                    f"{name} of table {table}, row {rows[at]}, column {column}: "
                    f"{values[0]!r} and {values[1]!r}"
                )
    return None


def _bytes_of(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Return the bytes of each row, so that zeros of two signs differ."""
    width = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(len(array), width)
