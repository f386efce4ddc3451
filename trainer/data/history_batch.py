"""Events of histories in a batch: each once, and the range of them that each sample sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from presage.schemas.arrays import (
    Array,
    distinct_values,
    numpy_of,
    one_chunk,
    ranges,
)
from presage.schemas.config.job import TableConfig
from presage.schemas.dataset.history_files import HistoryReader
from presage.schemas.rows import rows_of_values


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySpec:
    """What a batch has of a history.

    Attributes:
        name: of the history.
        columns: of its events.
        tables: by column, the table whose rows its values become; others stay numbers.
        num_events: newest events that a sample sees; None: all.
    """

    name: str
    columns: tuple[str, ...]
    tables: Mapping[str, str]
    num_events: int | None


@dataclass(frozen=True, slots=True)
class HistoryRows:
    """The events that the samples of a row group see.

    Attributes:
        key: (num_samples,) int64, equal for samples of one key.
        starts: (num_samples,) int64, the first event that each sample sees.
        ends: (num_samples,) int64, one after the last.
        ticks: (num_events,) int64, when they are available, in ticks since 1970.
        values: by column, (num_events,).
    """

    key: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    ticks: NDArray[np.int64]
    values: Mapping[str, Array]

    def arrays(self, name: str) -> dict[str, Array]:
        """Return all arrays by the name of the history and the field."""
        fields = {f: getattr(self, f) for f in _FIELDS}
        fields |= {f"values/{column}": array for column, array in self.values.items()}
        return {f"{name}/{field}": array for field, array in fields.items()}

    @classmethod
    def of(cls, name: str, columns: Sequence[str], arrays: Mapping[str, Array]) -> HistoryRows:
        """Undo `arrays`."""
        values = {column: arrays[f"{name}/values/{column}"] for column in columns}
        key, starts, ends, ticks = (arrays[f"{name}/{field}"] for field in _FIELDS)
        return cls(key, starts, ends, ticks, values)


_FIELDS = ("key", "starts", "ends", "ticks")


def read_history(
    spec: HistorySpec,
    tables: Mapping[str, TableConfig],
    dtype: str,
    reader: HistoryReader,
    segment_id: str,
    keys: pa.Array | pa.ChunkedArray,
    counts: NDArray[np.int64],
) -> HistoryRows:
    """Return the events that samples of a row group see.

    Args:
        spec: of the history.
        tables: of the job.
        dtype: of numbers that are not whole.
        reader: of the history.
        segment_id: of the samples.
        keys: (num_samples,) session keys.
        counts: (num_samples,) events of its own segment that each sample sees.

    Raises:
        SchemaError: a file is missing or changed.
    """
    keys = one_chunk(keys)
    if pa.types.is_dictionary(keys.type):
        keys = keys.dictionary_decode()
    distinct, code = distinct_values(keys)
    events = reader.join(segment_id, distinct)
    ends = events.own[code] + counts
    starts = events.starts[code]
    if spec.num_events is not None:
        starts = np.maximum(starts, ends - spec.num_events)
    values: dict[str, Array] = {}
    for column in spec.columns:
        if (table := spec.tables.get(column)) is not None:
            values[column] = rows_of_values(events.values[column], table, tables[table])
        else:
            numbers = numpy_of(events.values[column])
            is_float = np.issubdtype(numbers.dtype, np.floating)
            values[column] = numbers.astype(dtype if is_float else np.int64, copy=False)
    return HistoryRows(code.astype(np.int64), starts, ends, events.ticks, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryBatch:
    """The events of a history that the samples of a batch see, those of a key side by side.

    Attributes:
        values: by column, (num_events,): rows of a table or whole numbers as int64, or the loader's
            type of dense features.
        ticks: (num_events,) int64, when each is available, in ticks of the history since 1970.
        starts: (B,) int64, the first event that each sample sees.
        ends: (B,) int64, one after the last.
        runs: (num_runs + 1,) int64, offsets of the events of consecutive samples of one key.
    """

    values: Mapping[str, torch.Tensor]
    ticks: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    runs: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        """(B,) int64, events that each sample sees."""
        return self.ends - self.starts

    def materialize(self, columns: Sequence[str] | None = None) -> KeyedJaggedTensor:
        """Return the values of some columns of equal type with a copy for each sample.

        Args:
            columns: its keys, one bag per sample; None for all.
        """
        names = [*self.values] if columns is None else list(columns)
        lengths = self.lengths
        rows = torch.from_numpy(ranges(self.starts.numpy(), lengths.numpy()))
        return KeyedJaggedTensor(
            names,
            torch.cat([self.values[name][rows] for name in names]),
            lengths=lengths.to(torch.int32).repeat(len(names)),
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors."""
        return [*self.values.values(), self.ticks, self.starts, self.ends, self.runs]

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> HistoryBatch:
        """Return the events with a function applied to each tensor."""
        return replace(
            self,
            values={name: function(values) for name, values in self.values.items()},
            ticks=function(self.ticks),
            starts=function(self.starts),
            ends=function(self.ends),
            runs=function(self.runs),
        )


def concat_histories(
    columns: Sequence[str], parts: Sequence[tuple[HistoryRows | None, int, slice]]
) -> HistoryBatch:
    """Return the events of samples, each once per run of samples of its key.

    Args:
        columns: of the events.
        parts: events of a row group, number of samples, and these samples in the row group; None:
            samples of padding, which see none.
    """
    starts: list[NDArray[np.int64]] = []
    ends: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    ticks: list[NDArray[np.int64]] = []
    values: dict[str, list[Array]] = {column: [] for column in columns}
    num_events = 0
    for rows, num_samples, samples in parts:
        if rows is None:
            starts.append(np.full(num_samples, num_events))
            ends.append(starts[-1])
            continue
        key, first, end = rows.key[samples], rows.starts[samples], rows.ends[samples]
        cuts = np.flatnonzero(np.diff(key, prepend=-1))
        low = np.minimum.reduceat(first, cuts) if len(cuts) else first
        count = (np.maximum.reduceat(end, cuts) if len(cuts) else end) - low
        shift = np.repeat(
            num_events + np.cumsum(count) - count - low, np.diff(cuts, append=len(key))
        )
        chosen = ranges(low, count)
        starts.append(first + shift)
        ends.append(end + shift)
        lengths.append(count)
        ticks.append(rows.ticks[chosen])
        for name, column in rows.values.items():
            values[name].append(column[chosen])
        num_events += len(chosen)
    runs = np.cumsum(np.concatenate([[0], *lengths]))
    none = np.empty(0, np.int64)
    return HistoryBatch(
        values={n: torch.from_numpy(np.concatenate(of or [none])) for n, of in values.items()},
        ticks=torch.from_numpy(np.concatenate([none, *ticks])),
        starts=torch.from_numpy(np.concatenate(starts)),
        ends=torch.from_numpy(np.concatenate(ends)),
        runs=torch.from_numpy(runs),
    )
