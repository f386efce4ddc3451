"""Segments: one more in a dataset, and all of them read as one."""

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.build import build
from presage.pipelines.cli import main
from presage.pipelines.oracle.index import index_table
from presage.pipelines.table.expand import expand
from presage.pipelines.table.verify import verify
from presage.schemas.dataset.accesses import TableAccesses
from presage.schemas.dataset.manifest import commit_root, read_dataset, read_root
from presage.schemas.dataset.opened import Segment, open_dataset
from presage.schemas.dataset.run_next_uses import indexed_steps
from presage.schemas.dataset.samples import read_samples
from presage.schemas.errors import SchemaError
from presage.schemas.layout import SEGMENTS
from presage.schemas.oracle.next_uses import next_use
from presage.schemas.rows import rows_of_ids
from presage.schemas.storage.location import Location
from tests.pipelines.appending import DEFAULT, EXTRA, addition, changed, with_logs
from tests.pipelines.logs import (
    IN_PROCESS,
    SCHEMA,
    built,
    bytes_of,
    copy_of,
    raw_rows,
    request,
    samples_of,
)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with job, three logs and a dataset of the first; not to be changed."""
    return with_logs(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(one: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two segments, not to be changed."""
    dataset = copy_of(one / "dataset", tmp_path_factory.mktemp("two") / "dataset")
    build(addition(one / "job" / "job.yaml", one / "log-1", dataset))
    return dataset


NOT_OF_THE_SEGMENT = {
    "another default index": [
        ("{batch_samples: 32}\n  on_error", "{batch_samples: 64, epochs: 2}\n  on_error")
    ],
    "another name of the schema": [("data:\n", "data:\n  schema: columns.pbtxt\n")],
}


@pytest.mark.parametrize("name", NOT_OF_THE_SEGMENT)
def test_index_and_name_of_the_schema_are_not_of_the_segment(
    name: str, one: Path, two: Path, tmp_path: Path
) -> None:
    job = changed(tmp_path / "job", *NOT_OF_THE_SEGMENT[name])
    shutil.copy(job.parent / "schema.pbtxt", job.parent / "columns.pbtxt")
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    build(addition(job, one / "log-1", dataset))
    opened = open_dataset(dataset)
    assert [s.id for s in opened.segments] == [s.id for s in open_dataset(two).segments]
    assert verify(dataset)["problems"] == []
    index = opened.manifest.indexes[0]
    oracle = opened.job.data.oracle
    assert (index.batch_samples, index.epochs) == (oracle.batch_samples, oracle.epochs)
    assert len(index.parts) == 2


def brute_force(dataset: Path, table: str, epochs: int) -> list[dict[int, int]]:
    """Return the next-use distance of each row of each step, from the samples themselves."""
    opened = open_dataset(dataset)
    data = opened.job.data
    rows_per_step: list[set[int]] = []
    for segment in opened.segments:
        blocks = segment.column("num_samples")[segment.positions("train")]
        tables = pa.concat_tables(
            read_samples(replace(opened, segments=(segment,)), model_inputs=True)
        )
        starts = np.concatenate([[0], np.cumsum(blocks)])
        for first in range(0, len(blocks), 2):  # batches of two blocks
            start, end = starts[first], starts[min(first + 2, len(blocks))]
            part = tables.slice(int(start), int(end - start))
            ids: list[int] = []
            for feature in data.tables[table].features:
                for value in part[feature].to_pylist():
                    ids.extend(value if isinstance(value, list) else [value])
            valid = [i for i in ids if i is not None]
            found = rows_of_ids(np.array(valid, np.int64), table, data.tables[table])
            rows_per_step.append(set(found.tolist()))
    rows = np.array(sorted(set().union(*rows_per_step)), np.int64)
    steps = [np.searchsorted(rows, sorted(step)) for step in rows_per_step * epochs]
    return [
        dict(zip(rows[step].tolist(), distances.tolist(), strict=True))
        for step, distances in zip(steps, next_use(steps, len(rows)), strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("table", ["items", "users"])
def test_index_of_two_segments_equals_brute_force(
    two: Path, tmp_path: Path, table: str, epochs: int
) -> None:
    dataset = copy_of(two, tmp_path / "dataset")
    assert main(["oracle", str(dataset), "--reindex", "--epochs", str(epochs), IN_PROCESS]) == 0
    opened = open_dataset(dataset)
    order = opened.order(32, epochs, "none", 0)
    index, accesses = opened.index_for(order), TableAccesses(opened, table, order)
    found = [
        dict(zip(accesses.rows[numbers].tolist(), distances.tolist(), strict=True))
        for numbers, distances in indexed_steps(opened, index, table)
    ]
    assert found == brute_force(dataset, table, epochs)
    assert index.order.num_steps == len(found)
    assert index.num_accesses(table) == sum(map(len, found))


def test_appended_index_has_the_bytes_of_one_that_is_built_at_once(
    one: Path, two: Path, tmp_path: Path
) -> None:
    dataset = copy_of(two, tmp_path / "dataset")
    before, root = bytes_of(dataset), read_root(dataset)
    for index in root.manifest.indexes:
        shutil.rmtree(dataset / index.id)
    assert commit_root(dataset, root, replace(root.manifest, indexes=()))
    assert main(["oracle", str(dataset), "--reindex", IN_PROCESS]) == 0
    assert bytes_of(dataset) == before


def test_append_indexes_the_new_segment_only(
    one: Path, two: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    indexed = list[tuple[str, str]]()

    def index_and_note(root: Path, segment: Segment, table: str, *rest: object) -> object:
        indexed.append((segment.directory.name, table))
        return index_table(root, segment, table, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("presage.pipelines.table.indexes.index_table", index_and_note)
    dataset = copy_of(two, tmp_path / "dataset")
    before = {p: p.read_bytes() for p in dataset.glob("index-*/*/**/*") if p.is_file()}
    build(addition(one / "job" / "job.yaml", one / "log-2", dataset))
    opened = open_dataset(dataset)
    new = opened.segments[2].directory.name
    assert sorted(indexed) == sorted((new, table) for table in opened.job.data.tables)
    assert {p: p.read_bytes() for p in before} == before
    assert verify(dataset)["problems"] == []


def test_append_keeps_every_byte_of_the_segment_before(one: Path, two: Path) -> None:
    old, new = bytes_of(one / "dataset"), bytes_of(two)
    kept = {path for path in old if path.startswith((f"{SEGMENTS}/", "index-"))}
    assert kept
    assert {path: old[path] for path in kept} == {path: new[path] for path in kept}
    opened = open_dataset(two)
    assert [s.reference.position for s in opened.segments] == [0, 1]
    (index,) = opened.manifest.indexes
    assert list(index.parts) == [s.id for s in opened.segments]
    assert verify(two)["problems"] == []


def test_samples_of_two_segments_are_those_of_both_logs(
    one: Path, two: Path, tmp_path: Path
) -> None:
    expand(Location.parse(two), Location.parse(tmp_path / "all.parquet"))
    rows = pq.read_table(tmp_path / "all.parquet").to_pylist()
    names = ("session", "time", "user", "history", "item", "label")
    found = sorted(tuple(tuple(r[n]) if n == "history" else r[n] for n in names) for r in rows)
    both = samples_of(raw_rows(300, 0)) + samples_of(raw_rows(200, 1))
    assert found == sorted(both)


def test_appending_the_same_input_again_does_nothing(
    one: Path, two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = bytes_of(two)
    arguments = ["append", str(one / "job" / "job.yaml"), "--dataset", str(two), "--json"]
    assert main([*arguments, "--input", str(one / "log-1"), IN_PROCESS]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["built"], result["rows_per_sec"]) == (False, None)
    assert f"segment {result['segment']}: exists already, nothing to build" in printed.err
    assert bytes_of(two) == before


@pytest.mark.slow
def test_positions_decide_the_order_whoever_comes_first(one: Path, tmp_path: Path) -> None:
    job = one / "job" / "job.yaml"
    orders = {"forth": [(1, "log-1"), (2, "log-2")], "back": [(2, "log-2"), (1, "log-1")]}
    for name, segments in orders.items():
        dataset = copy_of(one / "dataset", tmp_path / name)
        for position, log in segments:
            build(addition(job, one / log, dataset, position))
    forward, backward = (bytes_of(tmp_path / name) for name in orders)
    assert forward == backward
    alone = read_dataset(build_alone(one, tmp_path / "alone")).indexes[0].parts
    for name in orders:
        parts = read_dataset(tmp_path / name).indexes[0].parts
        hashes = {segment.partition("-")[2]: p.manifest_sha256 for segment, p in parts.items()}
        (key,) = (segment.partition("-")[2] for segment in alone)
        assert [hashes[key]] == [part.manifest_sha256 for part in alone.values()]


def build_alone(one: Path, dataset: Path) -> Path:
    """Build a dataset of the last log alone."""
    build(request(one / "job" / "job.yaml", one / "log-2", dataset))
    return dataset


@pytest.mark.slow
def test_append_in_order_is_built_beside_others_and_enters_behind_those_before(
    one: Path, tmp_path: Path
) -> None:
    job = one / "job" / "job.yaml"
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    waits, results = threading.Event(), list[dict[str, object]]()

    def progress(line: str) -> None:
        if line == "segment built; waiting for the segment at position 1":
            waits.set()

    later = addition(
        job, one / "log-2", dataset, 2, "later", in_order=True, final=True, progress=progress
    )
    thread = threading.Thread(target=lambda: results.append(build(later)))
    thread.start()
    assert waits.wait(600)
    assert len(read_dataset(dataset).segments) == 1
    build(addition(job, one / "log-1", dataset, 1, in_order=True))
    thread.join(600)
    assert [s.id.partition("-")[0] for s in read_dataset(dataset).segments] == [
        "00000",
        "00001",
        "00002",
    ]
    assert read_dataset(dataset).sealed
    assert results[0]["waited_sec"] != 0


def test_append_in_order_without_a_position_is_refused(
    one: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(one / "job" / "job.yaml"), "--dataset", str(one / "dataset")]
    assert main(["append", *words, "--input", str(one / "log-1"), "--in-order"]) == 1
    message = "error: --in-order needs --position; name the position\n"
    assert capsys.readouterr().err == message


@pytest.mark.slow
def test_append_extends_every_index_that_the_dataset_has(one: Path, tmp_path: Path) -> None:
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    assert main(["oracle", str(dataset), "--reindex", "--epochs", "2", IN_PROCESS]) == 0
    build(addition(one / "job" / "job.yaml", one / "log-1", dataset))
    opened = open_dataset(dataset)
    assert sorted(i.epochs for i in opened.complete_indexes()) == [1, 2]
    before = {path for path in dataset.glob("index-*/*")}
    assert len(before) == 4
    build(addition(one / "job" / "job.yaml", one / "log-2", dataset))
    assert sorted(i.epochs for i in open_dataset(dataset).complete_indexes()) == [1, 2]
    added = set(dataset.glob("index-*/*")) - before
    assert len(added) == 2  # parts of the new segment alone
    assert verify(dataset)["problems"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("default", "answer"), [("", None), (DEFAULT, 2.5)])
def test_added_columns_are_answered_by_segments_that_were_built_before(
    one: Path, tmp_path: Path, default: str, answer: float | None
) -> None:
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    job = changed(
        tmp_path / "job",
        ("clicked AS label", "clicked AS label, 1.5::FLOAT AS price, user % 3 AS kind"),
        ("    users:", "    kinds: {features: [kind], num_rows: 8}\n    users:"),
        schema=SCHEMA
        + EXTRA
        + EXTRA.replace('"price" type: FLOAT', '"kind" type: INT').replace("dense", "sparse")
        + default,
    )
    build(addition(job, one / "log-1", dataset))
    assert verify(dataset)["problems"] == []
    expand(Location.parse(dataset), Location.parse(tmp_path / "all.parquet"))
    rows = pq.read_table(tmp_path / "all.parquet")
    old = open_dataset(dataset).segments[0].manifest.num_samples
    assert set(rows["price"].to_pylist()[:old]) == {answer}
    assert set(rows["kind"].to_pylist()[:old]) == {None}
    assert set(rows["price"].to_pylist()[old:]) == {1.5}
    assert set(rows["kind"].to_pylist()[old:]) == {0, 1, 2}
    assert main(["oracle", str(dataset), "--json"]) == 0


def test_segment_that_exists_at_another_position_is_refused(tmp_path: Path) -> None:
    dataset = built(tmp_path, 60)
    job, log = tmp_path / "job" / "job.yaml", tmp_path / "log"
    with pytest.raises(SchemaError, match=r"already exists, not at position 7 in .*; leave "):
        build(addition(job, log, dataset, position=7))
    assert not build(addition(job, log, dataset, position=0))["built"]
