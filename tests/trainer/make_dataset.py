"""A small dataset with its oracle, written by the functions of `schemas` alone."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from presage.schemas.arrays import large_list, offsets_of, unique_tuples
from presage.schemas.config.job import Job, load_job
from presage.schemas.dataset.files import describe_file, sha256_of, write_files
from presage.schemas.dataset.manifest import (
    DatasetManifest,
    Reference,
    SegmentManifest,
    TableCounts,
    commit_root,
    new_index,
    read_dataset,
    read_root,
    write_manifest,
)
from presage.schemas.dataset.opened import open_root, version_name
from presage.schemas.layout import (
    BLOCK,
    BLOCKS,
    FILE_SHIFT,
    FILES,
    JOB,
    MANIFEST,
    SCHEMA,
    SEGMENTS,
    UNIQUE_INDEX,
    access_schema,
    blocks_schema,
    inverse_column,
    num_unique_column,
    part_path,
)
from presage.schemas.oracle.next_uses import unique_per_block
from presage.schemas.rows import rows_of_ids
from presage.schemas.storage.location import Location
from tests.schemas.parts import gaps_of, num_entries, numbered, write_index

BLOCK_SAMPLES = 16
BLOCKS_PER_ROW_GROUP = 3
JOB_TEXT = """\
name: small
data:
  sources: {{log: {{files: "*.parquet", format: parquet}}}}
  samples: {{map: "SELECT * FROM log"}}
  session: {{key: session, time: time}}
  groups:
    user: [user, clicked{weights}, age]
    request: [page, viewed]
  tables:
    users: {{features: [user], num_rows: 9223372036854775808}}
    items: {{features: [clicked, item, viewed], num_rows: {items}}}
    pages: {{features: [page], num_rows: 12, rows: identity}}
  block_samples: 16
  oracle: {{batch_samples: {planned}, epochs: {epochs}, order: {{shuffle: {shuffle}, seed: 5}}}}
train:
  model: {model}
  embedding_dim: 8
  batch_samples: 64
  epochs: {epochs}
  dtype: {dtype}
  pooling: {pooling}
  num_threads: 2
  dense_optimizer: {{learning_rate: 0.003}}
  sparse_optimizer: {{name: {optimizer}, learning_rate: 0.05}}
  cache: {{policy: {policy}, lookahead: {lookahead}, rows: {rows}, files: {files}}}
  checkpoint: {{every_steps: {every_steps}, keep: 20, late: wait{checkpoint}}}
  follow: {{poll: {poll}}}
"""

_ROLES = {
    "session": ("INT", "kept", False),
    "clicked_flag": ("INT", "label", False),
    "sample_weight": ("FLOAT", "weight", False),
    "user": ("INT", "sparse", False),
    "clicked": ("INT", "sparse", True),
    "item": ("INT", "sparse", False),
    "page": ("INT", "sparse", False),
    "viewed": ("INT", "sparse", True),
    "price": ("FLOAT", "dense", False),
    "age": ("FLOAT", "dense", False),
}
_WEIGHTS = {"clicked_weights": ("FLOAT", "kept", True)}
_DEFAULTS = {
    "weights": "",
    "checkpoint": "",
    "epochs": "2",
    "planned": "64",
    "items": "300",
    "shuffle": "blocks",
    "model": "{bottom_layers: [16], top_layers: [16]}",
    "dtype": "float64",
    "pooling": "mean",
    "optimizer": "rowwise_adagrad",
    "policy": "ttl",
    "lookahead": "3",
    "rows": "null",
    "every_steps": "null",
    "files": "log",
    "poll": "1ms",
}


def write_job(folder: Path, **changes: str) -> Path:
    """Write `job.yaml` and `schema.pbtxt`; `changes` replace values of the train section.

    With `weights=", clicked_weights"` the entries of one list have weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = JOB_TEXT.format(**{**_DEFAULTS, **changes})
    (folder / JOB).write_text(text, encoding="utf-8")
    lines: list[str] = []
    declared = _ROLES | (_WEIGHTS if "weights" in changes else {})
    for name, (kind, role, is_list) in declared.items():
        count = " value_count { min: 0 }" if is_list else ""
        lines.append(
            f'feature {{ name: "{name}" type: {kind}{count} annotation {{ tag: "{role}" }} }}'
        )
    (folder / SCHEMA).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / JOB


def make_samples(num_samples: int, seed: int, ids: int = 350) -> pa.Table:
    """Return samples in training order: sessions lie together, and share user and history.

    `ids` is the number of items that histories have.
    """
    rng = np.random.default_rng(seed)
    session = np.sort(rng.integers(0, max(1, num_samples // 9), num_samples))
    requests = session * 3 + np.sort(rng.integers(0, 3, num_samples))
    item = rng.zipf(1.3, num_samples) % 400
    chance = 1 / (1 + np.exp(-((item % 7) - 3.0 + (session % 5) * 0.4)))
    null_user, null_list = session % 11 == 0, requests % 13 == 0
    clicked = _lists(session, 40, None, ids)
    clicked_weights = (1 + np.arange(len(clicked.values)) % 8) / np.float32(8)
    return pa.table(
        {
            "session": session.astype(np.int64),
            "clicked_flag": (rng.random(num_samples) < chance).astype(np.int8),
            "sample_weight": (1 + rng.integers(0, 3, num_samples)).astype(np.float32),
            "user": pa.array((session * 7919) % 10007, pa.int64(), mask=null_user),
            "clicked": clicked,
            "clicked_weights": large_list(
                clicked_weights[clicked.values.to_numpy() % 64], clicked.offsets.to_numpy()
            ),
            "age": pa.array((session % 60).astype(np.float32) / 60, mask=session % 7 == 0),
            "page": (requests % 12).astype(np.int64),
            "viewed": _lists(requests, 6, null_list, ids),
            "item": pa.array(item, pa.int64(), mask=item % 29 == 0),
            "price": rng.standard_normal(num_samples).astype(np.float32),
        }
    )


def _lists(key: np.ndarray, longest: int, missing: np.ndarray | None, ids: int) -> pa.Array:
    lengths = (key * 31) % (longest + 1)
    offsets = offsets_of(lengths)
    values = (
        np.repeat(key, lengths) * 17 + np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths) * 5
    ) % ids
    if missing is None:
        return large_list(values, offsets)
    return pa.LargeListArray.from_arrays(
        pa.array(offsets), pa.array(values), mask=pa.array(missing)
    )


def make_dataset(
    folder: Path,
    job_path: Path,
    segments: list[list[tuple[int, int]]],
    seed: int = 0,
    *,
    sealed: bool = False,
    days: Sequence[str | None] = (),
    earlier: Path | None = None,
) -> Path:
    """Write a dataset.

    Args:
        folder: new folder.
        job_path: from `write_job`.
        segments: for each segment and file the training and the evaluation samples.
        seed: of the samples.
        sealed: whether no segment follows.
        days: of the segments, none for those beyond.
        earlier: dataset with the first of these segments, which is not changed.
    """
    job = load_job(job_path)
    hashes = [_write_version(folder, job_path.parent / name) for name in (JOB, SCHEMA)]
    references = () if earlier is None else read_dataset(earlier).segments
    if earlier is not None:
        shutil.copytree(earlier / SEGMENTS, folder / SEGMENTS, copy_function=os.link)
    references += tuple(
        _write_segment(folder, job, index, files, seed + 100 * index, day)
        for index, (files, day) in enumerate(zip_longest(segments, days[: len(segments)]))
        if index >= len(references)
    )
    manifest = DatasetManifest(
        writer="test",
        name=job.name,
        job_sha256=hashes[0],
        schema_sha256=hashes[1],
        segments=references,
        sealed=sealed,
    )
    oracle = job.data.oracle
    index = new_index(oracle.batch_samples, oracle.epochs, oracle.order.shuffle, oracle.order.seed)
    index = write_index(open_root(Location.parse(folder), manifest), index)
    commit_root(folder, None, replace(manifest, indexes=(index,)))
    return folder


def _write_version(folder: Path, source: Path) -> str:
    """Write a job or schema file as the root names it, and a copy; return its hash."""
    sha256 = sha256_of(source)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (source.name, version_name(source.name, sha256)):
        (folder / name).write_bytes(source.read_bytes())
    return sha256


def change_root(dataset: Path, change: Callable[[DatasetManifest], DatasetManifest]) -> None:
    """Commit a change of the root manifest."""
    root = read_root(dataset)
    assert commit_root(dataset, root, change(root.manifest)) is not None


def _write_segment(
    folder: Path, job: Job, index: int, files: list[tuple[int, int]], seed: int, day: str | None
) -> Reference:
    root = folder / SEGMENTS / f"{index:012x}-5a11"
    ids = job.data.tables["items"].num_rows * 7 // 6  # some share a row
    rows: list[dict[str, object]] = []
    parts: list[tuple[pa.Table, np.ndarray, np.ndarray]] = []
    for number, (num_train, num_evaluation) in enumerate(files):
        table = make_samples(num_train + num_evaluation, seed + number, ids)
        if "clicked_weights" not in job.data.group_of_column:
            table = table.drop_columns(["clicked_weights"])
        train = np.arange(len(table)) < num_train
        place = np.where(train, np.arange(len(table)), np.arange(len(table)) - num_train)
        block = place // BLOCK_SAMPLES + np.where(train, 0, -(-num_train // BLOCK_SAMPLES))
        parts.append((table, block, train))
        rows.extend(_write_file(root, job, number, table, block, train))
    blocks = pa.Table.from_pylist(
        sorted(rows, key=lambda r: r["split"] != "train"), blocks_schema(job.data.groups)
    )
    pq.write_table(blocks, root / BLOCKS)
    tables = {name: _write_access(root, job, name, parts) for name in job.data.tables}
    entries = [
        describe_file(p, str(p.relative_to(root)))
        for p in sorted(root.rglob("*.parquet"))
        if p.name not in (BLOCKS, FILES)
    ]
    files_sha256 = write_files(root / FILES, entries)
    splits = blocks["split"].to_pylist()
    num_train = splits.count("train")
    manifest = SegmentManifest(
        num_samples=sum(a + b for a, b in files),
        num_sessions=0,
        num_rejects=0,
        input_bytes=0,
        dataset_bytes=0,
        oracle_bytes=0,
        splits={"train": (0, num_train), "evaluation": (num_train, len(splits) - num_train)},
        groups={},
        tables=tables,
        listing=(),
        job_sha256="",
        schema_sha256="",
        blocks_sha256=sha256_of(root / BLOCKS),
        files_sha256=files_sha256,
        directories=tuple(sorted({entry.path.rpartition("/")[0] for entry in entries})),
        partition_key=job.data.session.key,
        num_parts=len(files),
    )
    return Reference(id=root.name, manifest_sha256=write_manifest(root, manifest), day=day)


def _write_file(
    root: Path, job: Job, number: int, table: pa.Table, block: np.ndarray, train: np.ndarray
) -> list[dict[str, object]]:
    ids = (number << FILE_SHIFT) + block
    grouped = [c for columns in job.data.groups.values() for c in columns]
    samples = table.drop_columns(grouped).add_column(0, BLOCK, pa.array(ids))
    counts = np.bincount(block)
    stored = [(samples, block)]
    sparse = list(job.data.table_of_feature)
    uniques: dict[str, np.ndarray] = {}
    for group, columns in job.data.groups.items():
        first, inverse = unique_tuples([block, *_comparable(table, columns)])
        uniques[group] = np.bincount(block[first])
        starts = offsets_of(uniques[group])[:-1]
        local = (inverse - starts[block]).astype(np.int32)
        samples = samples.append_column(inverse_column(group), pa.array(local))
        unique_index = (np.arange(len(first)) - starts[block[first]]).astype(np.int32)
        tuples = table.select(list(columns)).take(first)
        stored.append((tuples, block[first]))
        tuples = tuples.add_column(0, UNIQUE_INDEX, pa.array(unique_index))
        tuples = tuples.add_column(0, BLOCK, pa.array(ids[first]))
        _write_row_groups(root / part_path(number, "groups", group), tuples, block[first])
    _write_row_groups(root / part_path(number, "samples"), samples, block)
    return [
        {
            "block": int((number << FILE_SHIFT) + b),
            "split": "train" if train[block == b][0] else "evaluation",
            "window": 0,
            "file": number,
            "row_group": b // BLOCKS_PER_ROW_GROUP,
            "num_samples": int(counts[b]),
            "num_sessions": 0,
            "weight": table["sample_weight"].filter(block == b).to_numpy().sum(dtype=float),
            "num_lookups": num_entries(table.filter(block == b), sparse),
            "num_lookups_dedup": sum(num_entries(t.filter(at == b), sparse) for t, at in stored),
            **{num_unique_column(g): int(u[b]) for g, u in uniques.items()},
        }
        for b in range(len(counts))
    ]


def _comparable(table: pa.Table, columns: tuple[str, ...]) -> list[np.ndarray]:
    """Return one column: equal numbers for equal tuples, by way of Python objects."""
    seen: dict[str, int] = {}
    tuples = (str(row) for row in table.select(list(columns)).to_pylist())
    return [np.array([seen.setdefault(t, len(seen)) for t in tuples], np.int64)]


def _write_row_groups(path: Path, table: pa.Table, block: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(path, table.schema) as writer:
        row_group = block // BLOCKS_PER_ROW_GROUP
        for group in range(int(row_group[-1]) + 1):
            chosen = np.flatnonzero(row_group == group)
            writer.write_table(table.slice(chosen[0], len(chosen)))


def _write_access(
    root: Path, job: Job, name: str, parts: list[tuple[pa.Table, np.ndarray, np.ndarray]]
) -> TableCounts:
    rows, blocks = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    num_blocks = 0
    for table, block, train in parts:
        for feature in job.data.tables[name].features:
            column = table[feature].to_pylist()
            for value, b, is_train in zip(column, block.tolist(), train.tolist(), strict=True):
                ids = value if isinstance(value, list) else [value]
                ids = [i for i in ids or [] if i is not None]
                if is_train and ids:
                    found = rows_of_ids(np.array(ids), name, job.data.tables[name])
                    rows.append(found)
                    blocks.append(np.full(len(found), num_blocks + b))
        num_blocks += int(block[train].max(initial=-1)) + 1
    accesses = unique_per_block(np.concatenate(rows), np.concatenate(blocks), num_blocks)
    numbers, row_of_number, _ = numbered(accesses)
    path = root / part_path(0, "access", name)
    path.parent.mkdir(parents=True)
    gaps = large_list(gaps_of(numbers), numbers.offsets)
    pq.write_table(pa.table([np.arange(num_blocks), gaps], access_schema()), path)
    path = root / part_path(0, "edges", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"row": row_of_number}), path)
    num_unique = len(row_of_number)
    return TableCounts(num_lookups=0, num_lookups_dedup=0, num_unique_rows=num_unique)


def bytes_of(path: Path) -> str:
    """Return the hash of a file's content."""
    return hashlib.sha256((path / MANIFEST if path.is_dir() else path).read_bytes()).hexdigest()
