"""How samples cross Beam's shuffle: by value, buffered per bundle, in two levels if they are many.

A mapper keeps the samples of a bundle, up to `BUFFER_BYTES`, and then sends the rows of each
destination once. Up to `MAX_DESTINATIONS` partitions, destinations are partitions. Above, they are
groups of partitions: a second worker receives a bucket of a group, about as much as one partition,
and sends its rows on. So a flush has at most `MAX_DESTINATIONS` elements, and the number of
elements does not grow with the square of the input (README: the scale model).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.coders import Coder
from apache_beam.coders.typecoders import registry
from apache_beam.metrics import Metrics
from apache_beam.transforms.window import GlobalWindows

from presage.pipelines.samples.tuples import (
    Tuples,
    concat_batches,
    concat_tuples,
    partition_of_session,
    partition_tuples,
)
from presage.pipelines.shuffle import ReceivedSamples, elements_of, from_ipc, to_ipc
from presage.pipelines.stages import BuildContext

MAX_DESTINATIONS = 1000
"""Destinations to which a mapper sends samples."""
BUFFER_BYTES = 128 << 20
"""Samples that a mapper keeps, at most, with tuples deduplicated within each chunk; partitioning
them takes about three times as much memory."""


class ElementCoder(Coder):
    """Samples or tables as bytes, for runners that separate the steps between which they pass."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    @classmethod
    def from_type_hint(cls, unused_typehint: type, unused_registry: Any) -> ElementCoder:
        """Return the coder of a type; Beam gives the parameters their names."""
        return cls(unused_typehint)

    def encode(self, value: Tuples | pa.Table) -> bytes:
        """Return an element as bytes."""
        return to_ipc(value)

    def decode(self, encoded: bytes) -> Any:
        """Undo `encode`."""
        return from_ipc(encoded)

    def estimate_size(self, value: Tuples | pa.Table) -> int:
        """Return the bytes of an element in memory."""
        return value.num_bytes if isinstance(value, Tuples) else value.nbytes

    def is_deterministic(self) -> bool:
        """Return False: equal elements with different chunks have different bytes."""
        return False

    def to_type_hint(self) -> type:
        """Return the encoded type."""
        return self._kind


for element_type in (Tuples, pa.Table):
    registry.register_coder(element_type, ElementCoder)


@dataclass(frozen=True, slots=True)
class Destinations:
    """Partitions of samples, in groups if there are more than `MAX_DESTINATIONS`.

    Attributes:
        key: column of the session keys.
        num_partitions: partitions of the hash of the key.
        per_group: consecutive partitions of a group, and buckets of a group: each is then about as
            large as a partition.
    """

    key: str
    num_partitions: int
    per_group: int

    @classmethod
    def of(cls, context: BuildContext) -> Destinations:
        """Return the destinations of the samples of a build."""
        per_group = -(-context.num_parts // MAX_DESTINATIONS)
        return cls(context.data.session.key, context.num_parts, per_group)

    @property
    def num_groups(self) -> int:
        """Groups of partitions."""
        return -(-self.num_partitions // self.per_group)

    def to_groups(self, samples: Tuples) -> Iterator[tuple[int, Tuples]]:
        """Yield the samples of each group under the number of one of its buckets."""
        bucket = random.randrange(self.per_group)  # spreads bytes, and does not affect the dataset
        groups = self._partitions(samples) // self.per_group
        for group, part in enumerate(partition_tuples(samples, groups, self.num_groups)):
            if part is not None:
                yield group * self.per_group + bucket, part

    def to_partitions(self, bucket: int, samples: Tuples) -> Iterator[tuple[int, Tuples]]:
        """Yield the samples of a bucket by partition."""
        first = bucket // self.per_group * self.per_group
        partitions = self._partitions(samples) - first
        for index, part in enumerate(partition_tuples(samples, partitions, self.per_group)):
            if part is not None:
                yield first + index, part

    def _partitions(self, samples: Tuples) -> Any:
        return partition_of_session(samples, self.key, self.num_partitions)


class _Sender(beam.DoFn):
    """Base of the DoFns that partition buffered samples; counts flushes and elements sent."""

    def __init__(self, destinations: Destinations, label: str) -> None:
        self.destinations = destinations
        self.flushes, self.elements = (
            Metrics.counter(label, name) for name in ("flushes", "elements")
        )

    def send(self, parts: Iterable[tuple[int, Tuples]]) -> Iterator[tuple[int, bytes]]:
        """Yield the elements of one flush."""
        self.flushes.inc()
        for destination, part in parts:
            for element in elements_of(part):
                self.elements.inc()
                yield destination, element


class _SendBundle(_Sender):
    """Sends the samples of a bundle to groups of partitions, or to partitions."""

    def start_bundle(self) -> None:
        self.chunks: list[Tuples] = []
        self.num_bytes = 0

    def process(self, samples: Tuples) -> Iterator[tuple[int, bytes]]:
        self.chunks.append(samples)
        self.num_bytes += samples.num_bytes
        if self.num_bytes >= BUFFER_BYTES:
            yield from self._flush()

    def finish_bundle(self) -> Any:
        for element in self._flush():
            yield GlobalWindows.windowed_value(element)

    def _flush(self) -> Iterator[tuple[int, bytes]]:
        if self.chunks:
            samples = concat_tuples(self.chunks)
            self.start_bundle()
            yield from self.send(self.destinations.to_groups(samples))


class _SendBucket(_Sender):
    """Sends the samples of a bucket of a group on to its partitions."""

    def process(self, bucket: tuple[int, Iterable[bytes]]) -> Iterator[tuple[int, bytes]]:
        number, sent = bucket
        for samples in concat_batches(ReceivedSamples(sent), BUFFER_BYTES):
            yield from self.send(self.destinations.to_partitions(number, samples))


@dataclass  # not frozen: Beam assigns to its transforms
class SendSamples(beam.PTransform):
    """Samples in chunks (`Tuples`) to (partition, element of samples), to group."""

    context: BuildContext

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Send the samples of each bundle; above `MAX_DESTINATIONS` partitions, send them again."""
        destinations = Destinations.of(self.context)
        hints = tuple[int, bytes]  # with them every runner uses the coder of bytes
        send = beam.ParDo(_SendBundle(destinations, "SendBundle"))
        sent = input_or_inputs | "send bundle" >> send.with_output_types(hints)
        if destinations.per_group > 1:
            divide = beam.ParDo(_SendBucket(destinations, "SendBucket"))
            sent = (
                sent
                | "group buckets" >> beam.GroupByKey()
                | "send bucket" >> divide.with_output_types(hints)
            )
        return sent
