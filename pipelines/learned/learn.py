"""Learn what transforms need from the training samples, before any part is built.

Each chunk of samples counts its own, in the same stage that makes it; counts
meet by key, a vocabulary's in `NUM_SHARDS` ranges of the value's hash. So no
worker holds more than a shard until the entries are sorted once, at the end:
that takes about 50 bytes an entry that is kept (half a gigabyte for ten
million), and workers that look rows up about 30.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.learned.apply import with_transforms
from pipelines.learned.files import LEARNED
from pipelines.learned.inputs import Input, learned_inputs
from pipelines.learned.partials import Counts, Drawn, Partial, Sums, drawn, summed, sums_of
from pipelines.samples.sampling import in_evaluation
from pipelines.samples.sql import LIST_INDEX
from pipelines.samples.tuples import Tuples
from pipelines.sources.read import ORIGIN
from schemas.columns import is_list, numpy_of, one_chunk
from schemas.hashing import splitmix64
from schemas.job import SAMPLES, DataConfig
from schemas.learned import (
    Learned,
    Numbers,
    encode_numbers,
    load_learned,
    load_versions,
    numbers_path,
)
from schemas.manifest import replace_bytes
from schemas.vocabulary import (
    append_entries,
    encode_version,
    join_versions,
    shards_of,
    value_type,
    version_path,
)

NUM_SHARDS = 16


def partials(
    samples: Tuples, inputs: Sequence[Input], data: DataConfig
) -> Iterator[tuple[str, Partial]]:
    """Yield what one chunk of samples contributes, by key.

    Args:
        samples: of one chunk, with origins; only its training range is looked at.
        inputs: of the job.
        data: the job's data section.
    """
    training = ~in_evaluation(samples, data) if inputs else np.zeros(0, bool)
    if not training.any():
        return
    for wanted in inputs:
        column, counts = counted_column(samples, wanted, training)
        if wanted.vocabulary is not None:
            for shard, table in _sharded(column, counts):
                yield f"{wanted.vocabulary}/{shard}", Counts(table)
        elif wanted.quantiles is None:
            values, times = _flat(column, counts)
            yield wanted.numbers or "", sums_of(numpy_of(values), times)
        else:
            yield wanted.numbers or "", _drawn_of(samples, wanted, column, training)


def counted_column(
    samples: Tuples, wanted: Input, training: NDArray[np.bool_]
) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return a column over its distinct tuples, and how many training samples have each."""
    if wanted.group == SAMPLES:
        table, counts = samples.samples, training.astype(np.int64)
    else:
        table = samples.uniques[wanted.group]
        references = samples.references[wanted.group][training]
        counts = np.bincount(references, minlength=table.num_rows).astype(np.int64)
    table = with_transforms(table, wanted.group, wanted.before, Learned())
    return one_chunk(table[wanted.column]), counts


def _flat(column: pa.Array, counts: NDArray[np.int64]) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the values of a column or of its lists, without nulls, with their counts."""
    if is_list(column.type):
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        column, counts = column.flatten(), np.repeat(counts, lengths)
    if column.null_count:
        valid = column.is_valid()
        counts = counts[valid.to_numpy(zero_copy_only=False)]
        column = column.drop_null()
    return column, counts


def _sharded(column: pa.Array, counts: NDArray[np.int64]) -> Iterator[tuple[int, pa.Table]]:
    values, times = _flat(column, counts)
    values = values.cast(value_type(values.type))
    table = pa.table({"value": values, "count": pa.array(times)}).filter(pa.array(times > 0))
    table = summed(table)
    shard = shards_of(one_chunk(table["value"]), NUM_SHARDS)
    for index in np.unique(shard).tolist():
        yield index, table.filter(pa.array(shard == index))


def _drawn_of(
    samples: Tuples, wanted: Input, column: pa.Array, training: NDArray[np.bool_]
) -> Drawn:
    rows = np.flatnonzero(training)
    if wanted.group != SAMPLES:
        column = column.take(pa.array(samples.references[wanted.group]))
    values = pc.fill_null(column.cast(pa.float64(), safe=False), float("nan"))
    numbers = values.to_numpy(zero_copy_only=False)[rows]
    origins, indices = (samples.samples[c].to_numpy()[rows] for c in (ORIGIN, LIST_INDEX))
    keys = splitmix64(splitmix64(origins) ^ splitmix64(indices))
    used = np.isfinite(numbers)
    return drawn(keys[used], numbers[used])


PENDING = 8
"""Contributions of one key that wait to be merged at once."""


def with_partial(pending: list[Partial], element: Partial) -> list[Partial]:
    """Add one contribution of a key to those that wait; merges them when they are many."""
    pending.append(element)
    return pending if len(pending) < PENDING else merged(pending)


def merged(parts: Sequence[Partial]) -> list[Partial]:
    """Merge contributions of one key; none stay none."""
    return [parts[0].merged(parts[1:])] if parts else []


def shrink(root: Path, data: DataConfig, key: str, partial: Partial) -> Partial | str:
    """Leave of a vocabulary's shard only what can become an entry, in a file; return its name.

    Args:
        root: directory of the segment being built.
        data: the job's data section.
        key: of the contribution.
        partial: all contributions of the key together.
    """
    if not isinstance(partial, Counts):
        return partial
    config = data.vocabularies[key.split("/")[0]]
    often = partial.table["count"].to_numpy() >= config.min_count
    name = f"{uuid.uuid4().hex}.arrow"  # never in the dataset
    folder = root / LEARNED / "shards"
    folder.mkdir(parents=True, exist_ok=True)
    table = partial.table.filter(pa.array(often))
    with (
        pa.OSFile(str(folder / name), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    return name


def settle(
    root: Path, found: Mapping[str, Any], data: DataConfig, base: Mapping[str, str]
) -> dict[str, str]:
    """Write the new versions of vocabularies, and the numbers where there are none yet.

    Args:
        root: directory to write below; holds the files of `base`.
        found: key to sums, or to the file of a vocabulary's shard below `shards`.
        data: the job's data section.
        base: files of the segments before, path to sha256.

    Returns:
        All files, old and new: path to sha256.
    """
    files = dict(base)
    for name in data.vocabularies:
        shards = [root / "shards" / found[k] for k in sorted(found) if k.startswith(f"{name}/")]
        if shards:
            _append(root, name, shards, data, files)
    known = load_learned(root, base, data).numbers
    numbers = numbers_of(found, data, known)
    if numbers:
        content = encode_numbers(numbers)
        _write(root, numbers_path(content), content, files)
    return files


def numbers_of(
    found: Mapping[str, Any], data: DataConfig, known: Mapping[str, Numbers]
) -> dict[str, Numbers]:
    """Return the numbers of each transform that learns some and has none yet.

    Raises:
        SchemaError: a column has no number in the training range.
    """
    numbers: dict[str, Numbers] = {}
    nothing = sums_of(np.zeros(0), np.zeros(0, np.int64))
    for wanted in learned_inputs(data):
        if (key := wanted.numbers) is None or key in known:
            continue
        if wanted.quantiles is not None:
            sample = found.get(key, drawn(np.zeros(0, np.uint64), np.zeros(0)))
            numbers[key] = sample.numbers(wanted.quantiles, key)
            continue
        sums: Sums = found.get(key, nothing)
        group, column = key.split(".", 1)
        transform = data.transforms[group][column]
        assert not isinstance(transform, str), "SQL learns nothing"
        numbers[key] = sums.numbers(transform.config.by, key)
    return numbers


def _append(
    root: Path, name: str, shards: Sequence[Path], data: DataConfig, files: dict[str, str]
) -> None:
    config = data.vocabularies[name]
    tables = [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in shards]
    counts = pa.concat_tables(tables)
    versions = load_versions(root, files, name)
    kind = counts.schema.field("value").type
    vocabulary = join_versions(versions, config.oov_rows, kind)
    entries = append_entries(vocabulary, counts, config.min_count, config.num_rows)
    if entries.num_rows:
        content = encode_version(entries, len(versions))
        _write(root, version_path(name, len(versions), content), content, files)


def _write(root: Path, path: str, content: bytes, files: dict[str, str]) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(root / path, content)
    files[path] = hashlib.sha256(content).hexdigest()
