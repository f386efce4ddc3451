"""A dataset of a few blocks, written by the rules of `schemas/formats/` without the pipelines."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from presage.schemas import layout
from presage.schemas.arrays import Jagged, comparable_tuple, large_list, unique_tuples
from presage.schemas.dataset.files import describe_file, write_files
from presage.schemas.dataset.manifest import (
    DatasetManifest,
    GroupCounts,
    InputFile,
    Reference,
    SegmentManifest,
    TableCounts,
    commit_root,
    hash_of,
    new_index,
    write_manifest,
)
from presage.schemas.dataset.opened import open_root, version_name
from presage.schemas.hashing import hash_rows
from presage.schemas.oracle.miss_ratio import OptimalCache
from presage.schemas.oracle.next_uses import unique_per_block
from presage.schemas.storage.location import Location
from tests.schemas.parts import gaps_of, num_entries, numbered, write_index

JOB = """\
name: tiny
data:
  sources: {log: {files: "*.parquet", format: parquet}}
  samples: {map: SELECT * FROM log}
  session: {key: session_id, time: time}
  tables:
    items: {features: [item_id, history], num_rows: 50, rows: identity}
    users: {features: [user_id], num_rows: 1000}
  groups: {user: [user_id], histories: [history]}
  block_samples: 16
  oracle: {batch_samples: 32, epochs: 2}
train: {batch_samples: 32, epochs: 2}
"""

SCHEMA = "".join(
    f'feature {{ name: "{name}" type: {kind} annotation {{ tag: "{role}" }} {more}}}\n'
    for name, kind, role, more in [
        ("session_id", "INT", "kept", ""),
        ("time", "INT", "kept", ""),
        ("clicked", "INT", "label", ""),
        ("user_id", "INT", "sparse", ""),
        ("history", "INT", "sparse", "value_count { min: 0 } "),
        ("item_id", "INT", "sparse", ""),
        ("price", "FLOAT", "dense", ""),
    ]
)
GROUPS = {"user": ("user_id",), "histories": ("history",)}
TABLES = ("items", "users")
SPARSE = ("user_id", "history", "item_id")
NUM_TRAIN = 4


@dataclass(frozen=True)
class Place:
    """Where one block lies."""

    file: int
    row_group: int
    index: int
    split: str
    rows: tuple[int, int]

    @property
    def block(self) -> int:
        return self.file << layout.FILE_SHIFT | self.index


# Four blocks to train and one, cut short, to evaluate; two files; row groups of up to two blocks.
PLACES = (
    Place(0, 0, 0, "train", (0, 16)),
    Place(0, 0, 1, "train", (16, 32)),
    Place(0, 1, 2, "train", (32, 48)),
    Place(1, 0, 0, "train", (48, 64)),
    Place(1, 1, 1, "evaluation", (64, 70)),
)


def samples_of(seed: int) -> pa.Table:
    """70 samples of seven sessions in training order; a click moves the history by one."""
    rng = np.random.default_rng(seed)
    sessions = np.repeat(np.arange(7) + 10 * seed, 10)
    clicked = (rng.random(70) < 0.2).astype(np.int8)
    items = rng.integers(0, 50, 70)
    history: list[list[int]] = []
    for position in range(70):
        if position % 10 == 0:
            history.append(rng.integers(0, 50, rng.integers(0, 4)).tolist())
        elif clicked[position - 1]:
            history.append([*history[-1], int(items[position - 1])])
        else:
            history.append(history[-1])
    return pa.table(
        {
            "session_id": sessions,
            "time": pa.array(np.arange(70) * 1_000_000, pa.timestamp("us")),
            "clicked": clicked,
            "user_id": sessions % 5 - 2,  # negative ids, and users with two sessions
            "history": pa.array(history, pa.large_list(pa.int64())),
            "item_id": items,
            "price": rng.random(70).astype(np.float32),
        }
    )


def lookups_of(samples: pa.Table, table: str) -> list[np.ndarray]:
    """The rows of one table that each sample looks up."""
    if table == "users":
        return list(hash_rows(samples["user_id"].to_numpy(), "users", 1000).reshape(-1, 1))
    pairs = zip(samples["item_id"].to_pylist(), samples["history"].to_pylist(), strict=True)
    return [np.array([item, *history], np.int64) for item, history in pairs]


def block_tables(samples: pa.Table, place: Place) -> dict[str, pa.Table]:
    """One block of each table of the star, by directory."""
    start, end = place.rows
    mine = samples.slice(start, end - start)
    dedup = [column for columns in GROUPS.values() for column in columns]
    kept = mine.drop_columns(dedup).add_column(
        0, layout.BLOCK, pa.array([place.block] * len(mine), pa.int64())
    )
    tables: dict[str, pa.Table] = {}
    for group, columns in GROUPS.items():
        first, inverse_indices = unique_tuples(comparable_tuple(mine, columns))
        unique = mine.select(columns).take(pa.array(first))
        keys = {
            layout.BLOCK: pa.array([place.block] * len(first), pa.int64()),
            layout.UNIQUE_INDEX: pa.array(np.arange(len(first), dtype=np.int32)),
        }
        unique_columns = {name: unique[name].combine_chunks() for name in columns}
        tables[f"groups/{group}"] = pa.table({**keys, **unique_columns})
        kept = kept.append_column(layout.inverse_column(group), pa.array(inverse_indices))
    return {**tables, "samples": kept}


def write_star(directory: Path, samples: pa.Table) -> dict[int, dict[str, pa.Table]]:
    """Write samples and groups; returns the tables of each block."""
    blocks = {place.block: block_tables(samples, place) for place in PLACES}
    for name in next(iter(blocks.values())):
        (directory / name).mkdir(parents=True)
        for file in sorted({place.file for place in PLACES}):
            places = [place for place in PLACES if place.file == file]
            schema = blocks[places[0].block][name].schema
            path = directory / name / layout.part_path(file)
            with pq.ParquetWriter(
                path, schema, compression="zstd", write_page_checksum=True
            ) as out:
                for row_group in sorted({place.row_group for place in places}):
                    whole = [blocks[p.block][name] for p in places if p.row_group == row_group]
                    out.write_table(pa.concat_tables(whole))
    return blocks


def write_oracle(directory: Path, samples: pa.Table) -> dict[str, tuple[Jagged, np.ndarray]]:
    """Write access lists and edges; returns numbers and rows by table."""
    train = [place for place in PLACES if place.split == "train"]
    found: dict[str, tuple[Jagged, np.ndarray]] = {}
    for table in TABLES:
        lookups = lookups_of(samples.slice(0, train[-1].rows[1]), table)
        blocks = np.repeat(np.arange(len(lookups)) // 16, [len(rows) for rows in lookups])
        numbers, rows, first = numbered(
            unique_per_block(np.concatenate(lookups), blocks, len(train))
        )
        names = pa.array([place.block for place in train], pa.int64())
        for part, places in enumerate((slice(0, 3), slice(3, 4))):
            positions = np.arange(len(train))[places]
            mine = numbers.take(positions)
            gaps = large_list(gaps_of(mine), mine.offsets)
            path = directory / layout.part_path(part, "access", table)
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table([names[places], gaps], layout.access_schema()), path)
            new = np.isin(first, positions)
            edges = pa.table([rows[new]], layout.EDGES_SCHEMA)
            path = directory / layout.part_path(part, "edges", table)
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(edges, path)
        found[table] = (numbers, rows)
    return found


def write_blocks(
    directory: Path, samples: pa.Table, blocks: Mapping[int, Mapping[str, pa.Table]]
) -> None:
    """Write `blocks.parquet`."""
    rows = [
        {
            "block": place.block,
            "split": place.split,
            "window": 0,
            "file": place.file,
            "row_group": place.row_group,
            "num_samples": place.rows[1] - place.rows[0],
            "num_sessions": len(range(-(-place.rows[0] // 10), -(-place.rows[1] // 10))),
            "weight": float(place.rows[1] - place.rows[0]),
            "num_lookups": num_entries(samples.slice(place.rows[0], 16), SPARSE),
            "num_lookups_dedup": sum(num_entries(t, SPARSE) for t in blocks[place.block].values()),
            **{f"{g}_num_unique": len(blocks[place.block][f"groups/{g}"]) for g in GROUPS},
        }
        for place in PLACES
    ]
    table = pa.Table.from_pylist(rows, layout.blocks_schema(GROUPS))
    pq.write_table(table, directory / layout.BLOCKS, compression="zstd")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_segment(root: Path, seed: int) -> Reference:
    """Write one segment."""
    samples = samples_of(seed)
    directory = root / layout.SEGMENTS / f"{seed:05d}-tiny"
    directory.mkdir(parents=True)
    blocks = write_star(directory, samples)
    oracle = write_oracle(directory, samples)
    write_blocks(directory, samples, blocks)
    text = b"datasets { num_examples: 70 }\n"
    (directory / layout.STATISTICS).write_bytes(pa.compress(text, "zstd", asbytes=True))
    names = sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and path.name != layout.BLOCKS
    )
    entries = [describe_file(directory / name, name) for name in names]
    files_sha256 = write_files(directory / layout.FILES, entries)
    unique = {g: sum(len(b[f"groups/{g}"]) for b in blocks.values()) for g in GROUPS}
    manifest = SegmentManifest(
        num_samples=70,
        num_sessions=7,
        num_rejects=0,
        input_bytes=1,
        dataset_bytes=sum(
            path.stat().st_size
            for part in ("samples", "groups")
            for path in (directory / part).rglob("*.parquet")
        ),
        oracle_bytes=0,
        splits={"train": (0, NUM_TRAIN), "evaluation": (NUM_TRAIN, 1)},
        groups={
            g: GroupCounts(num_unique=n, dedup_factor=70 / n, num_values=0, num_values_dedup=0)
            for g, n in unique.items()
        },
        tables={
            t: TableCounts(num_lookups=0, num_lookups_dedup=0, num_unique_rows=len(rows))
            for t, (_, rows) in oracle.items()
        },
        listing=(InputFile(source="log", path="0.parquet", num_bytes=1, sha256="0" * 64),),
        job_sha256=hash_of(JOB),
        schema_sha256=hashlib.sha256(SCHEMA.encode()).hexdigest(),
        blocks_sha256=sha256(directory / layout.BLOCKS),
        files_sha256=files_sha256,
        directories=tuple(sorted({name.rpartition("/")[0] for name in names if "/" in name})),
        partition_key="session_id",
        num_parts=1,
    )
    return Reference(id=directory.name, manifest_sha256=write_manifest(directory, manifest))


def merge_blocks(numbers: Jagged, positions: np.ndarray) -> np.ndarray:
    """The ascending distinct numbers of some blocks taken together: a step's entries."""
    return np.unique(numbers.take(positions).values)


def write_dataset(root: Path, num_segments: int = 2) -> None:
    """Write a whole dataset, with an index of batches of two blocks over two unshuffled epochs."""
    root.mkdir(parents=True)
    manifest = DatasetManifest(
        writer="test",
        name="tiny",
        job_sha256=write_version(root, layout.JOB, JOB),
        schema_sha256=write_version(root, layout.SCHEMA, SCHEMA),
        segments=tuple(write_segment(root, seed) for seed in range(num_segments)),
    )
    index = replace(new_index(32, 2, "none", 0), id="index-tiny")
    index = write_index(open_root(Location.parse(root), manifest), index)
    commit_root(root, None, replace(manifest, indexes=(index,)))


def write_version(root: Path, name: str, text: str) -> str:
    """Write a job or schema file under the name of its content; returns its hash."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    (root / version_name(name, digest)).write_text(text)
    return digest


def optimal_hit_rates(accesses: np.ndarray, capacities: Iterable[int]) -> np.ndarray:
    """Return the hit rate of the optimal cache of each capacity."""
    cache = OptimalCache(accesses)
    return np.array([cache.hits(c) for c in capacities], np.float64) / max(1, len(accesses))
