"""How samples cross from the workers that make them to those that cluster them.

By reference, where workers share a directory: a mapper writes one LZ4 Arrow
file per chunk and table, one record batch per part, and sends references
through the runner's shuffle. Only references that came through the committed
grouping are read; what a failed attempt left behind goes with the directory at
the commit.

By value, where they do not: the runner's shuffle carries the tables themselves,
as LZ4 Arrow IPC in packets of at most 8 MiB. In memory, where all is one process
(`executor.py`). The dataset has the same bytes.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from pipelines.beam.packets import from_message, messages, packets, to_message
from pipelines.samples.tuples import Tuples

SHUFFLE = "shuffle"
"""Directory below a segment being built; gone before the commit."""

_REFERENCE = "_reference_"


class Reference(NamedTuple):
    """Where the samples of one part in one chunk lie.

    Attributes:
        name: of the chunk's files, unique over all attempts.
        batch: record batch in each of them.
        num_samples: rows.
    """

    name: str
    batch: int
    num_samples: int


class Crossing(Protocol):
    """A way for samples to cross."""

    element: ClassVar[type]
    """What the runner's shuffle carries; Beam has a coder for it."""

    def send(self, parts: Sequence[Tuples | None]) -> Iterator[tuple[int, Any]]:
        """Yield (part, element) pairs for the samples of one chunk, cut by part.

        Args:
            parts: samples of each part, None where there are none; at least one is not None.
        """
        ...

    def receive(self, sent: Iterable[Any]) -> Iterable[Tuples]:
        """Return the samples of one part, read chunk by chunk each time they are gone through.

        Args:
            sent: its elements in any order, which can be gone through again and again.
        """
        ...


@dataclass(frozen=True, slots=True)
class Again:
    """What a function yields, anew for each who goes through it."""

    make: Callable[[], Iterator[Tuples]]

    def __iter__(self) -> Iterator[Tuples]:
        """Yield everything from the beginning."""
        return self.make()


@dataclass(frozen=True, slots=True)
class ByReference:
    """Through files in a directory that all workers share.

    Attributes:
        root: directory of the segment being built.
        groups: names of the groups.
    """

    root: Path
    groups: tuple[str, ...]
    element: ClassVar[type] = Reference

    def send(self, parts: Sequence[Tuples | None]) -> Iterator[tuple[int, Reference]]:
        """Write the samples, then yield their references."""
        name = uuid.uuid4().hex  # never in the dataset: only this attempt's references know it
        yield from write_chunk(self.root, name, parts).items()

    def receive(self, sent: Iterable[Reference]) -> Again:
        """Read the samples, references in the order of their names."""
        references = sorted(sent)
        return Again(lambda: (read_reference(self.root, r, self.groups) for r in references))


@dataclass(frozen=True, slots=True)
class ByValue:
    """Through the runner's shuffle.

    Attributes:
        groups: names of the groups.
    """

    groups: tuple[str, ...]
    element: ClassVar[type] = bytes

    def send(self, parts: Sequence[Tuples | None]) -> Iterator[tuple[int, bytes]]:
        """Yield the samples of each part in packets."""
        for index, part in enumerate(parts):
            if part is not None:
                tables = (part.uniques[group] for group in self.groups)
                for packet in packets(to_message(_with_references(part), *tables)):
                    yield index, packet

    def receive(self, sent: Iterable[bytes]) -> Again:
        """Join the packets; only messages of which some are still to come are kept."""
        seen: list[bytes] = []
        return Again(lambda: (self._samples(m) for m in same_again(messages(sent), seen)))

    def _samples(self, message: bytes) -> Tuples:
        table, *uniques = from_message(message)
        return _without_references(table, dict(zip(self.groups, uniques, strict=True)))


@dataclass(frozen=True, slots=True)
class InMemory:
    """Within one process: nothing is written."""

    element: ClassVar[type] = Tuples

    def send(self, parts: Sequence[Tuples | None]) -> Iterator[tuple[int, Tuples]]:
        """Yield the samples of each part, which hold no memory of the others."""
        alone = sum(part is not None for part in parts) == 1
        for index, part in enumerate(parts):
            if part is not None:
                yield index, part if alone else _copied(part)

    def receive(self, sent: Iterable[Tuples]) -> Iterable[Tuples]:
        """Return the samples as they were sent."""
        return list(sent)


def _copied(part: Tuples) -> Tuples:
    uniques = {g: table.take(pa.array(np.arange(len(table)))) for g, table in part.uniques.items()}
    return Tuples(part.take(np.arange(part.num_samples)).samples, part.references, uniques)


def same_again(arrived: Iterable[bytes], seen: list[bytes]) -> Iterator[bytes]:
    """Yield messages; raise when they come in another order than when they were first gone through.

    Runners promise that grouped values can be gone through again, and no order.

    Args:
        arrived: the messages.
        seen: their digests, as far as they have been gone through; added to.
    """
    for index, message in enumerate(arrived):
        digest = hashlib.sha256(message).digest()
        if index == len(seen):
            seen.append(digest)
        if digest != seen[index]:
            raise RuntimeError("samples must come in the same order again, got another; try again")
        yield message


def write_chunk(root: Path, name: str, parts: Sequence[Tuples | None]) -> dict[int, Reference]:
    """Write the samples of one chunk, cut by part.

    Args:
        root: directory of the segment being built.
        name: unique name of the chunk and the attempt.
        parts: samples of each part, None where there are none; at least one is not None.

    Returns:
        A reference for each part that has samples.
    """
    present = {index: part for index, part in enumerate(parts) if part is not None}
    (root / SHUFFLE).mkdir(parents=True, exist_ok=True)
    _write(root, f"{name}.samples", [_with_references(p) for p in present.values()])
    for group in next(iter(present.values())).uniques:
        _write(root, f"{name}.{group}", [p.uniques[group] for p in present.values()])
    return {
        index: Reference(name, batch, part.num_samples)
        for batch, (index, part) in enumerate(present.items())
    }


def _with_references(part: Tuples) -> pa.Table:
    table = part.samples
    for group, references in part.references.items():
        column = pa.array(references.astype("int32"))
        table = table.append_column(_REFERENCE + group, column)
    return table


def _write(root: Path, name: str, tables: Sequence[pa.Table]) -> None:
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    schema = tables[0].schema
    with (
        pa.OSFile(str(root / SHUFFLE / f"{name}.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, schema, options=options) as writer,
    ):
        for table in tables:
            (batch,) = table.combine_chunks().to_batches()  # a part that is present has rows
            writer.write_batch(batch)


def read_reference(root: Path, reference: Reference, groups: Sequence[str]) -> Tuples:
    """Read the samples that a reference names.

    Args:
        root: directory of the segment being built.
        reference: from `write_chunk`.
        groups: names of the groups.
    """
    samples = _read(root, f"{reference.name}.samples", reference.batch)
    uniques = {g: _read(root, f"{reference.name}.{g}", reference.batch) for g in groups}
    return _without_references(samples, uniques)


def _without_references(table: pa.Table, uniques: dict[str, pa.Table]) -> Tuples:
    hidden = [_REFERENCE + group for group in uniques]
    references = {g: table[_REFERENCE + g].to_numpy().astype("int64") for g in uniques}
    return Tuples(table.drop_columns(hidden) if hidden else table, references, uniques)


def _read(root: Path, name: str, batch: int) -> pa.Table:
    with pa.memory_map(str(root / SHUFFLE / f"{name}.arrow")) as source:
        return pa.Table.from_batches([pa.ipc.open_file(source).get_batch(batch)])
