"""The samples that `groups: auto` looks at: whole sessions of the training range, by hash.

The sessions with the smallest hashes of their keys are taken, as many as fit: so the sample depends
on nothing but the log. That hash also places sessions in the dataset, so the sample is what
the first blocks of the build hold.

What is read is bounded. `samples.map`: the input in the order of its listing until
`INPUT_BYTES`; sessions that may go on after that are left out where others are enough.
`samples.per`: the key columns of all files, and then the row groups of some keys, chosen by
hash, as long as these take no more than `INPUT_BYTES`: so every key is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.parts.cluster import hash_session_keys, microseconds
from pipelines.prepare import Prepared
from pipelines.samples.bad_rows import SqlResult
from pipelines.samples.passed_lists import map_samples
from pipelines.samples.per_key import PerKey, in_origin_order, run_keys
from pipelines.samples.sampling import sample_negatives
from pipelines.samples.sql import connect, with_list_index
from pipelines.samples.tuples import separate
from pipelines.samples.validate import usable_samples
from pipelines.sources.folder import Folder
from pipelines.sources.read import parts_of_file, read_part
from pipelines.sources.rows import ORIGIN, FilePart
from schemas.columns import is_list, one_chunk
from schemas.features import FeatureSet
from schemas.job import DataConfig

INPUT_BYTES = 256 << 20
"""Bytes of input files that are read at most, but for key columns and for one key."""
MAX_CELLS = 1 << 21
"""Values in the sample at most, list values included: some 15,000 samples of the demo."""
MAX_RAW_ROWS = 1 << 18
"""Raw rows of `samples.per` at most, but for one key."""
_EDGE = 8
"""Of a log that is not read to its end, the last of this many parts shows what goes on."""


@dataclass(slots=True)
class SmallestHashes:
    """Keeps the rows with the smallest hashes, whole hashes, as many as fit.

    What is kept depends on the set of rows that were added, not on their order: whatever a part of
    them pushes out, all of them would.

    Attributes:
        max_cells: values to keep at most; only the rows of the smallest hash are ever cut to fit,
            to those of the smallest origins.
        bound: only rows with hashes up to it are kept.
    """

    max_cells: int
    bound: int = (1 << 64) - 1
    table: pa.Table | None = None
    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))

    def add(self, table: pa.Table, hashes: NDArray[np.uint64]) -> None:
        """Add rows; what does not fit is forgotten, highest hashes first."""
        below = hashes <= np.uint64(self.bound)
        table = table.filter(pa.array(below))
        joined = table if self.table is None else pa.concat_tables([self.table, table])
        hashes = np.concatenate([self.hashes, hashes[below]])
        cells = cells_of(joined)
        if cells.sum() > self.max_cells:
            unique, inverse = np.unique(hashes, return_inverse=True)
            total = np.cumsum(np.bincount(inverse, cells))
            num_fitting = max(1, int(np.searchsorted(total, self.max_cells, side="right")))
            kept = np.flatnonzero(inverse < num_fitting)
            if num_fitting < len(unique):
                self.bound = int(unique[num_fitting]) - 1
            if num_fitting == 1 and total[0] > self.max_cells:
                kept = kept[np.argsort(joined[ORIGIN].to_numpy()[kept], kind="stable")]
                kept = kept[: int(np.searchsorted(np.cumsum(cells[kept]), self.max_cells)) + 1]
            joined, hashes = joined.take(pa.array(kept)), hashes[kept]
        self.table, self.hashes = joined, hashes


def cells_of(table: pa.Table) -> NDArray[np.int64]:
    """Return how many values each row has."""
    cells = np.full(table.num_rows, table.num_columns, np.int64)
    for name in table.column_names:
        if is_list(table.schema.field(name).type):
            lengths = pc.fill_null(pc.list_value_length(table[name]), 0)
            cells += one_chunk(lengths).to_numpy().astype(np.int64)
    return cells


@dataclass(frozen=True, slots=True)
class SessionSample:
    """Samples of whole sessions.

    Attributes:
        rows: samples with origins and list indices.
        share: of all sessions, about.
    """

    rows: pa.Table
    share: float


def sample_sessions(
    folder: Folder, data: DataConfig, features: FeatureSet, prepared: Prepared
) -> SessionSample | None:
    """Return samples of whole sessions of the training range, or None when there are none.

    Args:
        folder: input directory.
        data: the job's data section; its groups mean nothing.
        features: declared columns.
        prepared: from `prepare`, without groups.
    """
    kept = SmallestHashes(MAX_CELLS)
    last_keys: list[NDArray[np.uint64]] = []
    results = _mapped if data.samples.map is not None else _per_key
    whole = True
    for samples, is_edge in results(folder, data, prepared):
        good = _training(samples, data, features)
        if good is None:
            continue
        hashes = hash_session_keys(good[data.session.key])
        if is_edge:
            whole = False
            last_keys.append(np.unique(hashes))
        kept.add(good, hashes)
    rows = kept.table
    if rows is None:
        return None
    total = sum(f.num_bytes for f in prepared.listing)
    share = min(1.0, INPUT_BYTES / max(1, total)) * (kept.bound + 1) / 2**64
    if whole:
        return SessionSample(rows, share)
    goes_on = np.isin(hash_session_keys(rows[data.session.key]), np.concatenate(last_keys))
    return SessionSample(rows if goes_on.mean() > 0.5 else rows.filter(pa.array(~goes_on)), share)


def _training(samples: SqlResult, data: DataConfig, features: FeatureSet) -> pa.Table | None:
    """Return the samples that will be trained on."""
    if samples.samples is None or not samples.samples.num_rows:
        return None
    table = with_list_index(samples.samples)
    usable = usable_samples(separate(table, {}), features, data)[0]
    good = sample_negatives(usable, features, data).samples
    if data.split.evaluation_from is not None:
        first = microseconds(data.split.evaluation_from)
        good = good.filter(pc.less(good[data.session.time].cast(pa.int64()), first))
    return good if good.num_rows else None


def _parts(folder: Folder, data: DataConfig, prepared: Prepared) -> Iterator[tuple[FilePart, int]]:
    """Yield every part of every readable file with its bytes, in the order of the listing."""
    for index, file in enumerate(prepared.listing):
        whole = FilePart(file.source, file.path, index, num_bytes=file.num_bytes)
        parts, _ = parts_of_file(folder, whole, data.sources[file.source])
        for part in parts:
            yield part, max(1, file.num_bytes // len(parts))


def _mapped(
    folder: Folder, data: DataConfig, prepared: Prepared
) -> Iterator[tuple[SqlResult, bool]]:
    """Yield samples of the first `INPUT_BYTES`, and whether they lie at the end of a cut log."""
    connection, source = connect(), data.sample_source
    statement, passed = prepared.statement, prepared.passed
    schema = prepared.empty_rows[source].schema
    parts = list(_parts(folder, data, prepared))
    is_cut = sum(size for _, size in parts) > INPUT_BYTES
    done = 0
    for part, size in parts:
        if done >= INPUT_BYTES:
            break
        done += size
        is_edge = is_cut and done > INPUT_BYTES - INPUT_BYTES // _EDGE
        for rows in read_part(folder, part, data.sources[source], schema):
            if rows.table is not None and rows.table.num_rows:
                yield map_samples(connection, statement, passed, source, rows.table), is_edge


def _per_key(
    folder: Folder, data: DataConfig, prepared: Prepared
) -> Iterator[tuple[SqlResult, bool]]:
    """Yield samples of some keys, all rows of each in all sources."""
    assert data.samples.per is not None, "only jobs with samples.per group raw rows"
    key, source = data.samples.per.key, data.sample_source
    chosen, places = choose_keys(_key_index(folder, data, prepared), source)
    found: dict[str, list[pa.Table]] = {}
    for part in places:
        config, schema = data.sources[part.source], prepared.empty_rows[part.source].schema
        for rows in read_part(folder, part, config, schema):
            if rows.table is not None:
                keep = _in_keys(rows.table[key], chosen)
                found.setdefault(part.source, []).append(rows.table.filter(pa.array(keep)))
    tables = {name: in_origin_order(pa.concat_tables(t)) for name, t in found.items()}
    per = PerKey(prepared.statement, source, key)
    if tables.get(source):
        for result in run_keys(connect(), per, {**prepared.empty_rows, **tables}):
            yield result, False


def _in_keys(column: pa.ChunkedArray, chosen: NDArray[np.uint64]) -> NDArray[np.bool_]:
    valid = one_chunk(column).is_valid().to_numpy(zero_copy_only=False)
    keep = np.zeros(len(valid), bool)
    keep[valid] = np.isin(hash_session_keys(column.drop_null()), chosen)
    return keep


@dataclass(frozen=True, slots=True)
class KeysOfPart:
    """The keys below some hash that a part of a file holds.

    Attributes:
        part: where.
        num_bytes: to read it.
        hashes: ascending hashes of its keys.
        counts: rows of each.
    """

    part: FilePart
    num_bytes: int
    hashes: NDArray[np.uint64]
    counts: NDArray[np.int64]


def _key_index(folder: Folder, data: DataConfig, prepared: Prepared) -> list[KeysOfPart]:
    """Return which part holds which keys, those of a share of hashes when the input is large."""
    assert data.samples.per is not None, "only jobs with samples.per group raw rows"
    key = data.samples.per.key
    parts = list(_parts(folder, data, prepared))
    share = min(1.0, 4 * INPUT_BYTES / max(1, sum(size for _, size in parts)))
    bound = np.uint64(min(2**64 - 1, int(share * 2**64)))
    found: list[KeysOfPart] = []
    for part, size in parts:
        hashes = [
            hash_session_keys(column.drop_null())
            for column in _keys(folder, part, key, data, prepared)
        ]
        below = np.concatenate([h[h <= bound] for h in hashes] or [np.empty(0, np.uint64)])
        unique, counts = np.unique(below, return_counts=True)
        found.append(KeysOfPart(part, size, unique, counts))
    return found


def _keys(
    folder: Folder, part: FilePart, key: str, data: DataConfig, prepared: Prepared
) -> Iterator[pa.ChunkedArray]:
    """Yield the keys of a part; of Parquet no other column is read."""
    config, schema = data.sources[part.source], prepared.empty_rows[part.source].schema
    if config.format == "parquet":
        schema = pa.schema([schema.field(key), schema.field(schema.names[-1])])
        if config.columns:
            config = replace(config, columns={n: w for n, w in config.columns.items() if n == key})
    for rows in read_part(folder, part, config, schema):
        if rows.table is not None and rows.table.num_rows:
            yield rows.table[key]


def choose_keys(
    index: list[KeysOfPart], source: str, max_bytes: int = INPUT_BYTES, max_rows: int = MAX_RAW_ROWS
) -> tuple[NDArray[np.uint64], list[FilePart]]:
    """Choose keys in the order of their hashes whose parts are read for at most some bytes.

    Args:
        index: keys of all parts of all sources.
        source: the source whose keys have samples.
        max_bytes: bytes of all parts with one of the keys, but for the first key's.
        max_rows: rows of all keys, but for the first key's.

    Returns:
        Hashes of the chosen keys, ascending, and the parts that hold their rows.
    """
    with_samples = [k.hashes for k in index if k.part.source == source]
    candidates = np.unique(np.concatenate(with_samples or [np.empty(0, np.uint64)]))
    places: dict[int, list[int]] = {int(h): [] for h in candidates}
    rows = dict.fromkeys(places, 0)
    for number, keys in enumerate(index):
        for hashed, count in zip(keys.hashes.tolist(), keys.counts.tolist(), strict=True):
            if hashed in places:
                places[hashed].append(number)
                rows[hashed] += count
    touched: set[int] = set()
    chosen: list[int] = []
    num_bytes = num_rows = 0
    for hashed, numbers in places.items():
        more = sum(index[n].num_bytes for n in numbers if n not in touched)
        fits = num_bytes + more <= max_bytes and num_rows + rows[hashed] <= max_rows
        if fits or not chosen:
            chosen.append(hashed)
            touched.update(numbers)
            num_bytes, num_rows = num_bytes + more, num_rows + rows[hashed]
    return np.array(chosen, np.uint64), [index[n].part for n in sorted(touched)]
