"""A dataset that the pipelines built, read by `schemas/formats/` alone: JSON, zlib and Polars only.

What it finds is compared with the raw log.
"""

import hashlib
import json
import shutil
import zlib
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from presage.pipelines.cli import main
from presage.pipelines.clustering.storage_layout import StoredGroup
from tests.pipelines.logs import IN_PROCESS
from tests.pipelines.shifting import stored_as
from tests.schemas.reference import block_order

NUM_SAMPLES = 3000
JOB = """\
name: second
data:
  sources: {log: {files: "*.parquet", format: parquet}}
  samples:
    map: >
      SELECT * FROM log
  session: {key: session_id, time: time}
  split: {evaluation_from: 2026-01-02 12:00:00}
  window: {span: 12h}
  groups:
    user: [user_id, user_country]
    clicks: [clicked_items, clicked_codes]
  tables:
    items: {features: [item_id, clicked_items], rows: identity, num_rows: 1000000}
    users: {features: [user_id], num_rows: 1000}
    codes: {features: [item_code, clicked_codes], num_rows: 1000}
  block_samples: 64
  oracle: {batch_samples: 128, epochs: 2, order: {shuffle: blocks, seed: 5}}
  generate: {num_samples: 3000, seed: 2, start: 2026-01-01, span: 2d}
train: {batch_samples: 128, epochs: 2}
"""
COLUMNS = {
    "session_id": ("INT", "kept", False),
    "time": ("INT", "kept", False),
    "clicked": ("INT", "label", False),
    "user_id": ("INT", "sparse", False),
    "user_country": ("INT", "kept", False),
    "item_id": ("INT", "sparse", False),
    "clicked_items": ("INT", "sparse", True),
    "item_price": ("FLOAT", "dense", False),
    "item_code": ("BYTES", "sparse", False),
    "clicked_codes": ("BYTES", "sparse", True),
}
CODE = "item \N{MULTIPLICATION SIGN} "
MADE = {
    "time": "date_trunc('second', time) AS time",
    "item_code": f"'{CODE}' || item_id AS item_code",
    "clicked_codes": f"list_transform(clicked_items, lambda x: '{CODE}' || x) AS clicked_codes",
}
MASK = (1 << 64) - 1


def mix(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def hash_of(text: str) -> int:
    salt, data = mix(0), text.encode()
    total = sum(mix(byte + mix(place) + salt & MASK) for place, byte in enumerate(data))
    return mix(mix(total + len(data) & MASK) ^ salt)


def row_of(value: int | str, table: str) -> int:
    if isinstance(value, str):
        value = hash_of(value)
    if table == "items":
        return value
    salt = int.from_bytes(hashlib.sha256(table.encode()).digest()[:8], "little")
    return mix(value & MASK ^ salt) % 2**63 % 1000


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job, its log and its dataset."""
    folder = tmp_path_factory.mktemp("second")
    wanted = ", ".join(MADE.get(column, column) for column in COLUMNS)
    (folder / "job.yaml").write_text(JOB.replace("SELECT *", f"SELECT {wanted}"))
    (folder / "schema.pbtxt").write_text(
        "".join(
            f'feature {{ name: "{name}" type: {kind} annotation {{ tag: "{role}" }} '
            f"{'value_count { min: 0 } ' if is_list else ''}}}\n"
            for name, (kind, role, is_list) in COLUMNS.items()
        )
    )
    job, output = str(folder / "job.yaml"), str(folder / "log")
    assert main(["generate", job, "--output", output]) == 0
    command = ["build", job, "--input", output, "--output", str(folder / "dataset"), IN_PROCESS]
    windows = ("clicked_items", "clicked_codes")
    with stored_as({"user": StoredGroup(True), "clicks": StoredGroup(True, windows)}):
        assert main(command) == 0
    return folder


def root_of(dataset: Path) -> dict[str, Any]:
    """The newest version of the root; each names the hash of the one before."""
    versions = sorted((dataset / "_manifests").glob("*.json"))
    assert [path.name for path in versions] == [f"{n + 1:08d}.json" for n in range(len(versions))]
    bodies = [body_of(path) for path in versions]
    for path, body in zip(versions, bodies[1:], strict=False):
        assert body["parent_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    return bodies[-1]


def manifest(directory: Path, sha256: str | None = None) -> dict[str, Any]:
    return body_of(directory / "MANIFEST.json", sha256)


def directory_of(dataset: Path, reference: dict[str, Any]) -> Path:
    """The directory of a segment."""
    return dataset / "segments" / reference.get("path", reference["id"])


def body_of(path: Path, sha256: str | None = None) -> dict[str, Any]:
    data = path.read_bytes()
    assert sha256 in (None, hashlib.sha256(data).hexdigest())
    body = json.loads(data)
    assert data.decode() == json.dumps(body, indent=1, sort_keys=True) + "\n"
    checksum = body.pop("checksum")
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == checksum
    return body


@pytest.fixture(scope="module")
def segment(log: Path) -> Path:
    (reference,) = root_of(log / "dataset")["segments"]
    return directory_of(log / "dataset", reference)


def samples_of(log: Path) -> pl.DataFrame:
    paths = sorted((log / "log").glob("*.parquet"))
    rows = pl.concat([pl.read_parquet(path) for path in paths])
    return rows.with_columns(
        pl.col("time").dt.truncate("1s"),
        item_code=pl.format(CODE + "{}", "item_id"),
        clicked_codes=pl.col("clicked_items").list.eval(pl.format(CODE + "{}", pl.element())),
    ).select(list(COLUMNS))


def blocks_of(segment: Path) -> list[dict[str, Any]]:
    return pl.read_parquet(segment / "blocks.parquet").to_dicts()


def group_of(segment: Path, group: str) -> pl.DataFrame:
    """The rows of a group, from the tuples that blocks share and windows over buffers."""
    table = pl.read_parquet(segment / f"groups/{group}/*.parquet")
    assert table.columns == ["block", "unique_index", "tuple_index"]
    tuples = pl.read_parquet(segment / f"tuples/{group}/*.parquet")
    table = table.join(tuples, on="tuple_index", maintain_order="left").drop("tuple_index")
    for column in [c for c in table.columns if c.endswith("_window_buffer")]:
        name = column.removesuffix("_window_buffer")
        stored = pl.read_parquet(segment / f"buffers/{name}/*.parquet")
        buffers = dict(zip(stored["buffer_index"], stored[name].to_list(), strict=True))
        windows = [f"{name}_window_{part}" for part in ("buffer", "start", "length")]
        lists = [
            None if length < 0 else buffers[buffer][start : start + length] if length else []
            for buffer, start, length in table.select(windows).iter_rows()
        ]
        values = pl.Series(name, lists, dtype=stored.schema[name])
        table = table.drop(windows).with_columns(values)
    return table


LOOKUPS = {
    "items": [("samples", "item_id"), ("clicks", "clicked_items")],
    "codes": [("samples", "item_code"), ("clicks", "clicked_codes")],
    "users": [("user", "user_id")],
}


def lookups_of_blocks(segment: Path, table: str) -> dict[int, set[int]]:
    """The rows of each block by the star tables alone."""
    found: dict[int, set[int]] = {}
    for directory, column in LOOKUPS[table]:
        samples = directory == "samples"
        rows_of = pl.read_parquet(segment / "samples/*.parquet") if samples else None
        for record in (group_of(segment, directory) if rows_of is None else rows_of).to_dicts():
            values = record[column] if isinstance(record[column], list) else [record[column]]
            rows = {row_of(value, table) for value in values or [] if value is not None}
            found.setdefault(record["block"], set()).update(rows)
    return found


def numbers_of_blocks(segment: Path, table: str) -> list[list[int]]:
    files = sorted((segment / "access" / table).glob("*.parquet"))
    gaps = [row for file in files for row in pl.read_parquet(file)["gaps"].to_list()]
    return [list(accumulate(block)) for block in gaps]


@pytest.mark.slow
def test_every_byte_is_covered_by_the_root(log: Path) -> None:
    root = log / "dataset"
    top = root_of(root)
    covered = {root / name for name in ("job.yaml", "schema.pbtxt", "view.sql")}  # copies
    covered |= {p for name in ("_manifests", "builds") for p in (root / name).iterdir()}
    for name, key in (("job.yaml", "job_sha256"), ("schema.pbtxt", "schema_sha256")):
        path = root / f"{name}.{top[key][:12]}"
        assert hashlib.sha256(path.read_bytes()).hexdigest() == top[key]
        covered.add(path)
    parts = [(directory_of(root, r), r) for r in top["segments"]]
    for directory, reference in parts:
        anomalies = directory / f"anomalies-{reference['anomalies_sha256'][:12]}.pbtxt"
        digest = hashlib.sha256(anomalies.read_bytes()).hexdigest()
        assert digest == reference["anomalies_sha256"]
        covered.add(anomalies)
    parts += [(root / i["id"] / r["id"], r) for i in top["indexes"] for r in i["parts"].values()]
    for directory, reference in parts:
        body = manifest(directory, reference["manifest_sha256"])
        covered.add(directory / "MANIFEST.json")
        for name in {"blocks", "files"} & {key.removesuffix("_sha256") for key in body}:
            path = directory / f"{name}.parquet"
            assert hashlib.sha256(path.read_bytes()).hexdigest() == body[f"{name}_sha256"]
            covered.add(path)
        for entry in pl.read_parquet(directory / "files.parquet").to_dicts():
            data = (directory / entry["path"]).read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (
                entry["num_bytes"],
                entry["sha256"],
            )
            regions = [zlib.crc32(data[a:b]) for a, b in pairwise(entry["region_offsets"])]
            assert regions == entry["region_crc32"]
            covered.add(directory / entry["path"])
    assert covered == {path for path in root.rglob("*") if path.is_file()}


def test_join_of_the_star_gives_back_the_log(log: Path, segment: Path) -> None:
    joined = pl.read_parquet(segment / "samples/*.parquet")
    for name in manifest(segment)["split_times"]:
        seconds, rest = (pl.col(name).struct[n] for n in ("seconds", "microseconds"))
        joined = joined.with_columns((seconds * 10**6 + rest).cast(pl.Datetime("us")).alias(name))
    for group in ("user", "clicks"):
        joined = joined.join(
            group_of(segment, group),
            left_on=["block", f"{group}_inverse"],
            right_on=["block", "unique_index"],
            how="left",
            maintain_order="left",
        )
    key = ["session_id", "time", "item_id", "clicked", "item_price", "clicked_items"]
    original = samples_of(log)
    assert joined.height == original.height == NUM_SAMPLES
    assert joined.select(original.columns).sort(key).equals(original.sort(key))


def test_blocks_are_in_training_order_and_cut_as_specified(segment: Path) -> None:
    blocks = blocks_of(segment)
    keys = [(b["split"] == "evaluation", b["window"], b["block"]) for b in blocks]
    assert keys == sorted(keys)
    assert {b["split"] for b in blocks} == {"train", "evaluation"}
    assert len({b["window"] for b in blocks}) > 1
    ranges = [(b["file"], b["split"], b["window"]) for b in blocks]
    for mine, other, block in zip(ranges, [*ranges[1:], None], blocks, strict=True):
        assert block["num_samples"] == 64 or mine != other
        assert block["block"] >> 20 == block["file"]
    stored = pl.read_parquet(segment / "samples/*.parquet").group_by("block").len()
    assert dict(stored.iter_rows()) == {b["block"]: b["num_samples"] for b in blocks}
    body = manifest(segment)
    num_train = sum(b["split"] == "train" for b in blocks)
    assert body["splits"] == {
        "train": [0, num_train],
        "evaluation": [num_train, len(blocks) - num_train],
    }
    assert sum(b["num_samples"] for b in blocks) == body["num_samples"]
    for group, counts in body["groups"].items():
        assert sum(b[f"{group}_num_unique"] for b in blocks) == counts["num_unique"]


@pytest.mark.slow
@pytest.mark.parametrize("table", LOOKUPS)
def test_access_and_edges_equal_the_look_ups_of_the_star(segment: Path, table: str) -> None:
    train = [b["block"] for b in blocks_of(segment) if b["split"] == "train"]
    lookups = lookups_of_blocks(segment, table)
    expected = [sorted(lookups.get(block, ())) for block in train]
    numbers = numbers_of_blocks(segment, table)
    edges = pl.read_parquet(segment / "edges" / table / "*.parquet")
    rows = edges["row"].to_list()
    assert rows == list(dict.fromkeys(row for block in expected for row in block))
    assert [sorted(rows[n] for n in block) for block in numbers] == expected
    assert all(block == sorted(set(block)) for block in numbers)


def shuffled(dataset: Path, reference: dict[str, Any], epoch: int) -> list[int]:
    """The training blocks of a segment in the order of an epoch, in batches of two."""
    own = int.from_bytes(bytes.fromhex(reference["manifest_sha256"])[:8], "little")
    blocks = blocks_of(directory_of(dataset, reference))
    places = [(b["file"], b["row_group"]) for b in blocks if b["split"] == "train"]
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    row_groups = [numbers[place] for place in places]
    return block_order(5, epoch, reference.get("shuffle_key", own), row_groups, 2)


def steps_of(dataset: Path, table: str) -> list[list[list[list[int]]]]:
    """The entries of each step in the segment's own numbers, by segment and epoch."""
    steps: list[list[list[list[int]]]] = []
    for reference in root_of(dataset)["segments"]:
        numbers = numbers_of_blocks(directory_of(dataset, reference), table)
        steps.append([])
        for epoch in (0, 1):
            order = shuffled(dataset, reference, epoch)
            batches = [order[start : start + 2] for start in range(0, len(order), 2)]
            merged = [sorted(set().union(*(numbers[p] for p in batch))) for batch in batches]
            steps[-1].append(merged)
    return steps


def next_uses(steps: list[list[int]]) -> list[list[int]]:
    """Walk backwards over steps: the distance of each entry's next use, 0 without one."""
    expected: list[list[int]] = []
    seen: dict[int, int] = {}
    for step in range(len(steps) - 1, -1, -1):
        expected.append([seen.get(entry, step) - step for entry in steps[step]])
        seen.update(dict.fromkeys(steps[step], step))
    return expected[::-1]


@pytest.mark.parametrize("table", LOOKUPS)
def test_part_of_the_index_equals_a_walk_over_each_shuffled_epoch(log: Path, table: str) -> None:
    dataset = log / "dataset"
    ((first, second),) = steps_of(dataset, table)
    top = root_of(dataset)
    (index,), (segment,) = top["indexes"], top["segments"]
    directory = dataset / index["id"] / index["parts"][segment["id"]]["id"]
    found = pl.read_parquet(directory / table / "*.parquet")
    assert found["step"].to_list() == list(range(len(first) + len(second)))
    assert found["distances"].to_list() == next_uses(first) + next_uses(second)
    for epoch, steps in enumerate((first, second)):
        uses = pl.read_parquet(directory / table / f"uses-{epoch:05d}" / "*.parquet")
        users: dict[int, list[int]] = {}
        for step, entries in enumerate(steps):
            for number in entries:
                users.setdefault(number, []).append(step)
        assert uses["first_step"].to_list() == [users[n][0] for n in range(len(users))]
        assert uses["last_step"].to_list() == [users[n][-1] for n in range(len(users))]
    body = manifest(directory, index["parts"][segment["id"]]["manifest_sha256"])
    assert [body[key] for key in ("batch_samples", "epochs", "shuffle", "seed")] == [
        *(128, 2, "blocks", 5)
    ]
    assert body["num_accesses"][table] == [sum(map(len, each)) for each in (first, second)]
    assert body["num_steps"] == len(first)
    assert body["segment_sha256"] == segment["manifest_sha256"]


@pytest.fixture(scope="module")
def two(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset with a second segment."""
    folder = tmp_path_factory.mktemp("two")
    shutil.copytree(log / "dataset", folder / "dataset")
    job = (log / "job.yaml").read_text().replace("num_samples: 3000, seed: 2", "num_samples: 900")
    (folder / "job.yaml").write_text(job)
    shutil.copy(log / "schema.pbtxt", folder)
    job, output = str(folder / "job.yaml"), str(folder / "log")
    assert main(["generate", job, "--output", output]) == 0
    words = ["append", str(log / "job.yaml"), "--input", output, "--dataset"]
    assert main([*words, str(folder / "dataset"), IN_PROCESS]) == 0
    return folder / "dataset"


@pytest.mark.slow
@pytest.mark.parametrize("table", LOOKUPS)
def test_next_uses_of_two_segments_follow_from_their_parts(two: Path, table: str) -> None:
    top, steps = root_of(two), steps_of(two, table)
    (index,) = top["indexes"]
    rows: list[list[int]] = []
    distances: list[list[list[int]]] = []
    uses: list[list[list[tuple[int, int]]]] = []
    for segment in top["segments"]:
        part = two / index["id"] / index["parts"][segment["id"]]["id"] / table
        edges = pl.read_parquet(directory_of(two, segment) / "edges" / table / "*.parquet")
        rows.append(edges["row"].to_list())
        distances.append(pl.read_parquet(part / "*.parquet")["distances"].to_list())
        files = [pl.read_parquet(part / f"uses-{epoch:05d}" / "*.parquet") for epoch in (0, 1)]
        uses.append([list(file.iter_rows()) for file in files])
    pairs = [(epoch, s) for epoch in (0, 1) for s in (0, 1)]
    starts = [0, *accumulate(len(steps[s][epoch]) for epoch, s in pairs)]
    found: list[list[int]] = []
    later: dict[int, int] = {}
    for (epoch, s), start in reversed(list(zip(pairs, starts, strict=False))):
        by_last = sorted(range(len(rows[s])), key=lambda n: (uses[s][epoch][n][1], n))
        after = iter([later.get(rows[s][n], 0) for n in by_last])
        num_steps = len(steps[s][epoch])
        stored = distances[s][epoch * num_steps : (epoch + 1) * num_steps]
        linked = [
            [d or max(0, next(after) - start - step) for d in each]
            for step, each in enumerate(stored)
        ]
        found = linked + found
        later |= {row: start + uses[s][epoch][n][0] for n, row in enumerate(rows[s])}
    run = [[rows[s][n] for n in step] for epoch, s in pairs for step in steps[s][epoch]]
    assert found == next_uses(run)
