"""Events of histories in a batch: each once, and the range of them that each sample sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from presage.schemas.arrays import Array
from presage.schemas.arrays import ranges as ranges_of
from presage.schemas.dataset.history_windows import HistoryRuns


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryBatch:
    """The events of a history that the samples of a batch see, those of a key side by side.

    Attributes:
        values: by column, (num_events,): rows of a table or whole numbers as int64, or the loader's
            type of dense features.
        ticks: (num_events,) int64, when each is available, in ticks of the history since 1970.
        starts: (B,) int64, the first event that each sample sees.
        ends: (B,) int64, one after the last.
        times: (B,) int64, times of the samples, in ticks since 1970.
        runs: (num_runs + 1,) int64, offsets of the events of consecutive samples of one key.
    """

    values: Mapping[str, torch.Tensor]
    ticks: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    times: torch.Tensor
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
        rows = torch.from_numpy(ranges_of(self.starts.numpy(), lengths.numpy()))
        return KeyedJaggedTensor(
            names,
            torch.cat([self.values[name][rows] for name in names]),
            lengths=lengths.to(torch.int32).repeat(len(names)),
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors."""
        return [*self.values.values(), *(getattr(self, name) for name in _TENSORS)]

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> HistoryBatch:
        """Return the events with a function applied to each tensor."""
        values = {name: function(values) for name, values in self.values.items()}
        others = {name: function(getattr(self, name)) for name in _TENSORS}
        return replace(self, values=values, **others)


_TENSORS = ("ticks", "starts", "ends", "times", "runs")


def concat_histories(columns: Sequence[str], ranges: Sequence[HistoryRuns]) -> HistoryBatch:
    """Return the events of samples, each once for every run.

    Args:
        columns: of the events.
        ranges: the samples.
    """
    num_events = np.concatenate([[0], *(each.counts for each in ranges)])
    runs = np.cumsum(num_events)
    chosen = [ranges_of(each.low, each.counts) for each in ranges]
    shifts: list[NDArray[np.int64]] = []
    first = 0
    for each in ranges:
        end = first + len(each.low)
        shifts.append((runs[first:end] - each.low)[each.inverse])
        first = end
    with_events = [(each.rows, c) for each, c in zip(ranges, chosen, strict=True) if each.rows]
    none = np.empty(0, np.int64)

    def joined(arrays: Iterable[Array]) -> torch.Tensor:
        parts = list(arrays)
        return torch.from_numpy(np.concatenate(parts) if parts else none)

    return HistoryBatch(
        values={n: joined(rows.values[n][c] for rows, c in with_events) for n in columns},
        ticks=joined(rows.ticks[c] for rows, c in with_events),
        starts=joined(each.starts + shift for each, shift in zip(ranges, shifts, strict=True)),
        ends=joined(each.ends + shift for each, shift in zip(ranges, shifts, strict=True)),
        times=joined(each.times for each in ranges),
        runs=torch.from_numpy(runs),
    )
