"""The events of a history that each sample sees: windows, and the runs that samples share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.schemas.arrays import Array, distinct_values, numpy_of, one_chunk
from presage.schemas.config.histories import feature_of_history
from presage.schemas.config.job import DataConfig, TableConfig
from presage.schemas.dataset.history_files import HistoryReader
from presage.schemas.errors import SchemaError, suggest_name
from presage.schemas.rows import rows_of_values


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySpec:
    """What a batch has of a history.

    Attributes:
        name: of the history.
        columns: of its events.
        tables: by column, the table whose rows its values become; others stay numbers.
        tick: resolution of times.
        num_events: newest events that a sample sees; None: all.
        step: a window begins at a multiple of so many events, counted from the first one of its
            key in the segment of the sample, and has up to `step - 1` more events.
        runs: which neighbours share a run of events: samples of one `key`, those whose windows
            `start` at the same event, or those with the same `window`.
        sparse: columns that are sparse features of the batch, with a list for each run.
    """

    name: str
    columns: tuple[str, ...]
    tables: Mapping[str, str]
    tick: timedelta
    num_events: int | None
    step: int = 1
    runs: Literal["key", "start", "window"] = "key"
    sparse: tuple[str, ...] = ()

    @property
    def most_events(self) -> int | None:
        """Events of the longest window; None: all."""
        return None if self.num_events is None else self.num_events + self.step - 1

    @property
    def features(self) -> dict[str, str]:
        """Sparse feature of each column that is one."""
        return {column: feature_of_history(self.name, column) for column in self.sparse}

    @property
    def values(self) -> tuple[str, ...]:
        """Columns that are no features."""
        return tuple(column for column in self.columns if column not in self.sparse)

    @property
    def group(self) -> str:
        """Dedup group of these features, whose tuples are runs; no stored group has its name."""
        return f"histories/{self.name}"


def history_spec(data: DataConfig, name: str, num_events: int | None) -> HistorySpec:
    """Return a history of a dataset with all of its columns.

    Raises:
        SchemaError: the dataset lacks it.
    """
    if name not in data.histories:
        raise SchemaError(f"dataset has no history {name!r}; {suggest_name(name, data.histories)}")
    history = data.histories[name]
    return HistorySpec(
        name=name,
        columns=tuple(history.columns),
        tables=history.tables,
        tick=history.tick,
        num_events=num_events,
    )


def window_spec(data: DataConfig, name: str, length: int, step: int) -> HistorySpec:
    """Return the windows of a history with the columns that look up tables.

    Raises:
        SchemaError: the dataset lacks it.
    """
    spec = history_spec(data, name, length)
    return replace(spec, step=step, columns=tuple(spec.tables))


@dataclass(frozen=True, slots=True)
class HistoryRows:
    """The events that the samples of a row group see.

    Attributes:
        key: (num_samples,) int64, equal for samples of one key.
        starts: (num_samples,) int64, the first event that each sample sees.
        ends: (num_samples,) int64, one after the last.
        times: (num_samples,) int64, times of the samples, in ticks since 1970.
        ticks: (num_events,) int64, when they are available, in ticks since 1970.
        values: by column, (num_events,).
    """

    key: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    times: NDArray[np.int64]
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
        return cls(**{field: arrays[f"{name}/{field}"] for field in _FIELDS}, values=values)


_FIELDS = ("key", "starts", "ends", "times", "ticks")


def read_history(
    spec: HistorySpec,
    tables: Mapping[str, TableConfig],
    dtype: str,
    reader: HistoryReader,
    segment_id: str,
    keys: pa.Array | pa.ChunkedArray,
    times: pa.Array,
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
        times: (num_samples,) session times.
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
        first = (counts - spec.num_events) // spec.step * spec.step
        starts = np.maximum(starts, events.own[code] + first)
    values: dict[str, Array] = {}
    for column in spec.columns:
        if (table := spec.tables.get(column)) is not None:
            values[column] = rows_of_values(events.values[column], table, tables[table])
        else:
            numbers = numpy_of(events.values[column])
            is_float = np.issubdtype(numbers.dtype, np.floating)
            values[column] = numbers.astype(dtype if is_float else np.int64, copy=False)
    times = times.cast(pa.timestamp("us")).cast(pa.int64())
    ticks = numpy_of(times) // (spec.tick // timedelta(microseconds=1))
    return HistoryRows(code.astype(np.int64), starts, ends, ticks, events.ticks, values)


@dataclass(frozen=True, slots=True)
class HistoryRuns:
    """Consecutive samples of a row group that share a run of its events.

    Attributes:
        low: (num_runs,) int64, first event of each run.
        counts: (num_runs,) int64, its events.
        inverse: (num_samples,) int64, the run of each sample.
        starts: (num_samples,) int64, the first event that each sample sees.
        ends: (num_samples,) int64, one after the last.
        rows: of the row group; None for samples of padding, which see no events.
        samples: in the row group.
    """

    low: NDArray[np.int64]
    counts: NDArray[np.int64]
    inverse: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    rows: HistoryRows | None
    samples: slice

    @property
    def times(self) -> NDArray[np.int64]:
        """(num_samples,) int64, times of the samples, in ticks."""
        none = np.zeros(len(self.inverse), np.int64)
        return none if self.rows is None else self.rows.times[self.samples]

    def lists_of(self, column: str) -> tuple[Array, Array, Array]:
        """Return the values of a column, and the first of each run and one after its last."""
        none = np.empty(0, np.int64)
        values = none if self.rows is None else self.rows.values[column]
        return values, self.low, self.low + self.counts


def find_runs(
    spec: HistorySpec, rows: HistoryRows | None, samples: slice, *, expanded: bool = False
) -> HistoryRuns:
    """Return the runs of some samples of a row group: each event of one is seen by some sample.

    Args:
        spec: of the history.
        rows: events of the row group; None: samples of padding.
        samples: in the row group.
        expanded: a run for each sample, of the events that it sees.
    """
    num_samples = samples.stop - samples.start
    if rows is None or not num_samples:
        none, inverse = np.zeros(min(num_samples, 1), np.int64), np.zeros(num_samples, np.int64)
        if expanded:
            none, inverse = inverse, np.arange(num_samples)
        unseen = np.zeros(num_samples, np.int64)
        return HistoryRuns(none, none, inverse, unseen, unseen, None, samples)
    starts, ends = rows.starts[samples], rows.ends[samples]
    of_run = {"key": (), "start": (starts,), "window": (starts, ends)}[spec.runs]
    is_first = np.full(num_samples, expanded)
    for column in (rows.key[samples], *of_run):
        is_first |= np.diff(column, prepend=column[0] - 1) != 0
    # a run has no event that none of its samples sees
    is_first[1:] |= (starts[1:] > ends[:-1]) | (starts[1:] < starts[:-1])
    cuts = np.flatnonzero(is_first)
    low = np.minimum.reduceat(starts, cuts)
    counts = np.maximum.reduceat(ends, cuts) - low
    return HistoryRuns(low, counts, np.cumsum(is_first) - 1, starts, ends, rows, samples)
