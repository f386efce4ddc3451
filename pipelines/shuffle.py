"""How samples cross from the workers that make them to those that cluster them.

A mapper writes one LZ4 Arrow file per chunk and table, one record batch per
part, in a directory that all workers share, and sends references through the
runner's shuffle. Only references that came through the committed grouping are
read; what a failed attempt left behind goes with the directory at the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from pipelines.tuples import Tuples

SHUFFLE = "shuffle"
"""Directory below a segment being built; gone before the commit."""

_REFERENCE = "_reference_"


@dataclass(frozen=True, slots=True, order=True)
class Reference:
    """Where the samples of one part in one chunk lie.

    Attributes:
        name: of the chunk's files, unique over all attempts.
        batch: record batch in each of them.
        num_samples: rows.
    """

    name: str
    batch: int
    num_samples: int


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
    references = {g: samples[_REFERENCE + g].to_numpy().astype("int64") for g in groups}
    uniques = {g: _read(root, f"{reference.name}.{g}", reference.batch) for g in groups}
    return Tuples(
        samples.drop_columns([_REFERENCE + g for g in groups]) if groups else samples,
        references,
        uniques,
    )


def _read(root: Path, name: str, batch: int) -> pa.Table:
    with pa.memory_map(str(root / SHUFFLE / f"{name}.arrow")) as source:
        return pa.Table.from_batches([pa.ipc.open_file(source).get_batch(batch)])
