"""One part of a segment whose job has histories: events, then samples with their counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from presage.pipelines.clustering.part import PartResult, build_part
from presage.pipelines.clustering.storage_layout import SegmentLayout
from presage.pipelines.histories.event_files import HistoryPart, PartEvents, history_counts
from presage.pipelines.samples.tuples import Tuples
from presage.pipelines.shuffle import from_ipc
from presage.schemas.arrays import numpy_of
from presage.schemas.config.job import DataConfig
from presage.schemas.dataset.fitted import FittedValues
from presage.schemas.dataset.manifest import HistoryCounts
from presage.schemas.features import FeatureSet
from presage.schemas.layout import count_column
from presage.schemas.storage.location import Location


@dataclass(frozen=True, slots=True)
class PartHistories:
    """Counts of the events of a part by history, and the time of its first sample, if any."""

    events: Mapping[str, HistoryPart] = field(default_factory=dict)
    first_sample: int | None = None


@dataclass(frozen=True, slots=True)
class BuiltPart:
    """A written part; `result` is None if it has no sample."""

    result: PartResult | None
    histories: PartHistories = PartHistories()


class CountedSamples:
    """Samples with the counts of the events that they see, as a reiterable.

    Attributes:
        first: time of the first sample so far, microseconds; None without any.
    """

    first: int | None = None

    def __init__(
        self, samples: Iterable[Tuples], events: Mapping[str, PartEvents | None], data: DataConfig
    ) -> None:
        self._samples, self._events, self._data = samples, events, data

    def __iter__(self) -> Iterator[Tuples]:
        """Yield the chunks of samples."""
        session = self._data.session
        for chunk in self._samples:
            table, keys = chunk.samples, chunk.column(session.key)
            times = numpy_of(chunk.column(session.time).cast(pa.int64()))
            first = int(times.min())
            self.first = first if self.first is None else min(first, self.first)
            for name, events in self._events.items():
                history = self._data.histories[name]
                orders = None
                if history.before == "order" and history.order is not None:
                    orders = numpy_of(chunk.column(history.order)).astype(np.int64)
                counts = np.zeros(len(times), np.int32)
                if events is not None:
                    counts = events.counts(keys, times, orders)
                table = table.append_column(count_column(name), pa.array(counts))
            yield replace(chunk, samples=table)


def build_part_with_histories(
    root: Location,
    file_index: int,
    samples: Iterable[Tuples],
    events: Mapping[str, Sequence[pa.Table]],
    data: DataConfig,
    layout: SegmentLayout | Future[SegmentLayout],
    features: FeatureSet,
    fitted: FittedValues | None = None,
    end: int | None = None,
) -> BuiltPart:
    """Write the events and the samples of a part; see `build_part`.

    The part may lack samples, or events, which are tables by history. `end` is that of the
    segment's day, microseconds; None without a day.
    """
    of_part = {
        name: PartEvents(events[name], end) if events.get(name) else None for name in data.histories
    }
    written = {
        name: each.write(root, name, data.histories[name], file_index)
        for name, each in of_part.items()
        if each is not None
    }
    if next(iter(samples), None) is None:
        return BuiltPart(None, PartHistories(written, None))
    counted = CountedSamples(samples, of_part, data)
    result = build_part(root, file_index, counted, data, layout, features, fitted)
    return BuiltPart(result, PartHistories(written, counted.first))


# Elements of a part that are grouped together: samples, and events behind a mark.

_MARK = b"history "


def encode_events(name: str, content: bytes) -> bytes:
    """Return an element of events of a history, to be grouped with elements of samples."""
    return _MARK + name.encode() + b"\n" + content


class SampleElements:
    """The elements of samples among those of a part, as a reiterable."""

    def __init__(self, sent: Iterable[bytes]) -> None:
        self._sent = sent

    def __iter__(self) -> Iterator[bytes]:
        """Yield them."""
        return (element for element in self._sent if not element.startswith(_MARK))


def decode_events(sent: Iterable[bytes]) -> dict[str, list[pa.Table]]:
    """Return the events among the elements of a part, by history."""
    events: dict[str, list[pa.Table]] = {}
    for element in sent:
        if element.startswith(_MARK):
            name, _, content = element[len(_MARK) :].partition(b"\n")
            events.setdefault(name.decode(), []).append(from_ipc(content))
    return events


def segment_histories(
    parts: Sequence[PartHistories], data: DataConfig, taken: Mapping[str, str | None]
) -> dict[str, HistoryCounts]:
    """Return the counts of all histories of a segment.

    `taken` are the hashes of the pending events of the segment before.
    """
    first = min((p.first_sample for p in parts if p.first_sample is not None), default=0)
    return {
        name: history_counts(
            name,
            [part.events[name] for part in parts if name in part.events],
            first,
            taken.get(name),
        )
        for name in data.histories
    }
