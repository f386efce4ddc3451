"""Segments: one more in a dataset, and all of them read as one."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import publish as module
from pipelines.build import build
from pipelines.commands import main
from pipelines.commit import commit_root
from pipelines.expand import expand, expanded_tables
from pipelines.prepare import BuildRequest
from pipelines.verify import verify
from schemas.dataset import open_dataset
from schemas.errors import SchemaError
from schemas.layout import SEGMENTS
from schemas.manifest import read_dataset, write_manifest
from schemas.oracle import next_use
from schemas.rows import rows_of_ids
from tests.pipelines.logs import (
    SCHEMA,
    built,
    bytes_of,
    copy_of,
    raw_rows,
    request,
    samples_of,
    write_job,
    write_log,
)

EXTRA = 'feature { name: "price" type: FLOAT annotation { tag: "dense" } }\n'


def addition(
    job: Path, log: Path, dataset: Path, position: int | None = None, attempt: str = "more"
) -> BuildRequest:
    """Return a request for one more segment."""
    found = request(job, log, dataset)
    return replace(found, append=True, position=position, attempt=attempt)


def changed(directory: Path, *changes: tuple[str, str], schema: str = SCHEMA) -> Path:
    """Write the job with some texts replaced."""
    job = write_job(directory)
    text = job.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    job.write_text(text)
    (directory / "schema.pbtxt").write_text(schema)
    return job


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with job, three logs and a dataset of the first; not to be changed."""
    directory = tmp_path_factory.mktemp("one")
    built(directory)
    write_log(directory / "log-1", num_rows=200, seed=1)
    write_log(directory / "log-2", num_rows=150, seed=2)
    return directory


@pytest.fixture(scope="module")
def two(one: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two segments, not to be changed."""
    dataset = copy_of(one / "dataset", tmp_path_factory.mktemp("two") / "dataset")
    build(addition(one / "job" / "job.yaml", one / "log-1", dataset))
    return dataset


def brute_force(dataset: Path, table: str, epochs: int) -> list[np.ndarray]:
    """Return the next-use distances of each step from the samples themselves, in stored order."""
    opened = open_dataset(dataset)
    data = opened.job.data
    rows_per_step: list[set[int]] = []
    for segment in opened.segments:
        blocks = segment.column("num_samples")[segment.positions("train")]
        tables = pa.concat_tables(
            expanded_tables(replace(opened, segments=(segment,)), model_inputs=True)
        )
        starts = np.concatenate([[0], np.cumsum(blocks)])
        for first in range(0, len(blocks), 2):  # batches of two blocks
            start, end = starts[first], starts[min(first + 2, len(blocks))]
            part = tables.slice(int(start), int(end - start))
            ids: list[int] = []
            for feature in data.tables[table].features:
                for value in part[feature].to_pylist():
                    ids.extend(value if isinstance(value, list) else [value])
            known = [i for i in ids if i is not None]
            found = rows_of_ids(np.array(known, np.int64), table, data.tables[table])
            rows_per_step.append(set(found.tolist()))
    steps = rows_per_step * epochs
    number: dict[int, int] = {}
    for segment in opened.segments:  # first use: positions in order, rows of a block ascending
        for row in segment.rows(table).tolist():
            number.setdefault(row, len(number))
    numbered = [np.sort(np.array([number[r] for r in step], np.int64)) for step in steps]
    return next_use(numbered, len(number))


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("table", ["items", "users"])
def test_index_of_two_segments_equals_brute_force(
    two: Path, tmp_path: Path, table: str, epochs: int
) -> None:
    dataset = copy_of(two, tmp_path / "dataset")
    assert main(["oracle", str(dataset), "--reindex", "--epochs", str(epochs), "--json"]) == 0
    opened = open_dataset(dataset)
    index = opened.index_for(opened.order(32, epochs, "none", 0))
    expected = brute_force(dataset, table, epochs)
    assert index.manifest.num_steps == len(expected)
    assert np.array_equal(index.distances(table).values, np.concatenate(expected))
    assert index.distances(table).lengths.tolist() == [len(e) for e in expected]


def test_appended_index_has_the_bytes_of_one_that_is_built_at_once(
    one: Path, two: Path, tmp_path: Path
) -> None:
    dataset = copy_of(two, tmp_path / "dataset")
    index = open_dataset(dataset).indexes[0]
    before = bytes_of(index.directory)
    shutil.rmtree(index.directory)
    write_manifest(dataset, replace(read_dataset(dataset), indexes=()))
    assert main(["oracle", str(dataset), "--reindex", "--json"]) == 0
    assert bytes_of(index.directory) == before


def test_append_keeps_every_byte_of_the_segment_before(one: Path, two: Path) -> None:
    first = open_dataset(one / "dataset").segments[0]
    assert bytes_of(two / SEGMENTS / first.manifest.id) == bytes_of(first.directory)
    opened = open_dataset(two)
    assert [s.manifest.position for s in opened.segments] == [0, 1]
    assert opened.indexes[0].manifest.segments == tuple(s.manifest.id for s in opened.segments)
    assert verify(two)["problems"] == []


def test_samples_of_two_segments_are_those_of_both_logs(
    one: Path, two: Path, tmp_path: Path
) -> None:
    expand(two, tmp_path / "all.parquet")
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
    assert main([*arguments, "--input", str(one / "log-1")]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["built"], result["rows_per_sec"]) == (False, None)
    assert f"segment {result['segment']}: already there, nothing to do" in printed.err
    assert bytes_of(two) == before


def test_positions_decide_the_order_whoever_comes_first(one: Path, tmp_path: Path) -> None:
    job = one / "job" / "job.yaml"
    orders = {"forth": [(1, "log-1"), (2, "log-2")], "back": [(2, "log-2"), (1, "log-1")]}
    for name, segments in orders.items():
        dataset = copy_of(one / "dataset", tmp_path / name)
        for position, log in segments:
            build(addition(job, one / log, dataset, position))
    found = [open_dataset(tmp_path / name) for name in orders]
    assert found[0].manifest.segments == found[1].manifest.segments
    assert found[0].manifest.indexes[0] == found[1].manifest.indexes[0]


def test_append_at_a_taken_position_is_refused_before_the_work(one: Path, two: Path) -> None:
    taken = open_dataset(two).segments[1].manifest.id
    with pytest.raises(
        SchemaError,
        match=re.escape(
            f"position must be free, got 1, which {taken} has in {two}; choose another, or leave "
            "--position out to come last"
        ),
    ):
        build(addition(one / "job" / "job.yaml", one / "log-2", two, 1))


def test_append_to_no_dataset_is_refused(one: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"^manifest must exist, got none in "):
        build(addition(one / "job" / "job.yaml", one / "log-1", tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_append_extends_every_index_that_the_dataset_has(one: Path, tmp_path: Path) -> None:
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    assert main(["oracle", str(dataset), "--reindex", "--epochs", "2", "--json"]) == 0
    build(addition(one / "job" / "job.yaml", one / "log-1", dataset))
    opened = open_dataset(dataset)
    assert sorted(i.manifest.epochs for i in opened.indexes) == [1, 2]
    assert {len(i.manifest.segments) for i in opened.indexes} == {2}
    build(addition(one / "job" / "job.yaml", one / "log-2", dataset))
    assert len(list(dataset.glob("index-*"))) == 4  # those of this root and of the one before
    assert verify(dataset)["problems"] == []


PINNED = {
    "groups": (
        ("groups: {user: [session, user, history]}", "groups: {user: [session, history]}"),
        "data.groups.user must be ('session', 'user', 'history') as in the dataset, got "
        "('session', 'history')",
    ),
    "transforms": (
        ("ln(1 + len(history))", "ln(2 + len(history))"),
        "data.transforms.user.num_history must be 'ln(1 + len(history))' as in the dataset, got "
        "'ln(2 + len(history))'",
    ),
    "tables": (
        ("num_rows: 65536", "num_rows: 1024"),
        "data.tables.users.num_rows must be 65536 as in the dataset, got 1024",
    ),
    "blocks": (
        ("block_samples: 16", "block_samples: 32"),
        "data.block_samples must be 16 as in the dataset, got 32",
    ),
    "session gap": (
        ("time: time}", "time: time, gap: 60s}"),
        "data.session.gap must be None as in the dataset, got datetime.timedelta(seconds=60)",
    ),
    "name": (("name: shop", "name: mall"), "name must be 'shop' as in the dataset, got 'mall'"),
}


@pytest.mark.parametrize("case", PINNED)
def test_append_of_a_job_that_differs_in_what_is_pinned_names_the_key(
    one: Path, tmp_path: Path, case: str
) -> None:
    change, message = PINNED[case]
    job = changed(tmp_path / "job", change)
    whole = f"{message} in {job}; keep it, or build a new dataset"
    before = bytes_of(one / "dataset")
    with pytest.raises(SchemaError, match=f"^{re.escape(whole)}$"):
        build(addition(job, one / "log-1", one / "dataset"))
    assert bytes_of(one / "dataset") == before


COLUMNS = {
    "removed": (
        [("clicked AS label", "clicked AS label")],
        SCHEMA.replace('feature { name: "item"', 'feature { name: "thing"'),
        "column 'item' must be declared",
    ),
    "retyped": (
        [],
        SCHEMA.replace('name: "num_history" type: FLOAT', 'name: "num_history" type: INT'),
        "feature 'num_history' must be INT, got",
    ),
    "another role": (
        [],
        SCHEMA.replace(
            '"num_history" type: FLOAT annotation { tag: "dense" }',
            '"num_history" type: FLOAT annotation { tag: "kept" }',
        ),
        "role of column 'num_history' must be 'dense' as in the dataset, got 'kept'",
    ),
    "removed from SQL and schema": (
        [("transforms: {user: {num_history: ln(1 + len(history))}}", "transforms: {}")],
        SCHEMA.replace(
            'feature { name: "num_history" type: FLOAT annotation { tag: "dense" } }', ""
        ),
        "column 'num_history' must be declared as in the dataset, got none",
    ),
    "retyped in SQL": (
        [("clicked AS label", "clicked::INT AS label")],
        SCHEMA,
        "column 'label' must be int8 as in the dataset, got int32",
    ),
    "added, but required": (
        [("clicked AS label", "clicked AS label, 1.5::FLOAT AS price")],
        SCHEMA + EXTRA.replace("type: FLOAT", "type: FLOAT presence { min_fraction: 1 }"),
        "added column 'price' must be nullable, got one that is required",
    ),
    "added weight without default": (
        [("clicked AS label", "clicked AS label, 1.5::FLOAT AS price")],
        SCHEMA + EXTRA.replace("dense", "weight"),
        "added weight 'price' must have a default, got none",
    ),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_append_with_other_columns_is_refused_by_name(one: Path, tmp_path: Path, case: str) -> None:
    changes, schema, message = COLUMNS[case]
    job = changed(tmp_path / "job", *changes, schema=schema)
    before = bytes_of(one / "dataset")
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}"):
        build(addition(job, one / "log-1", one / "dataset"))
    assert bytes_of(one / "dataset") == before


def test_same_files_under_a_changed_job_are_refused(one: Path, tmp_path: Path) -> None:
    job = changed(tmp_path / "job", ("FROM log", "FROM log WHERE clicked = 1"))
    with pytest.raises(SchemaError, match=r"^input must be new to the dataset, got the files of"):
        build(addition(job, one / "log", one / "dataset"))


DEFAULT = """tensor_representation_group { key: "" value { tensor_representation { key: "price"
  value { dense_tensor { column_name: "price" default_value { float_value: 2.5 } } } } } }
"""


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
    expand(dataset, tmp_path / "all.parquet")
    rows = pq.read_table(tmp_path / "all.parquet")
    old = open_dataset(dataset).segments[0].manifest.num_samples
    assert set(rows["price"].to_pylist()[:old]) == {answer}
    assert set(rows["kind"].to_pylist()[:old]) == {None}
    assert set(rows["price"].to_pylist()[old:]) == {1.5}
    assert set(rows["kind"].to_pylist()[old:]) == {0, 1, 2}
    assert main(["oracle", str(dataset), "--json"]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("price", "default of feature 'price' must be INT, got 2.5 in "),
        ("sparse", "default of feature 'price' must not be given, got 2.5 for a column that is sp"),
    ],
)
def test_default_that_no_reader_could_give_is_refused(
    one: Path, tmp_path: Path, text: str, message: str
) -> None:
    extra = EXTRA.replace("FLOAT", "INT")
    extra = extra.replace("dense", "sparse") if text == "sparse" else extra
    job = changed(tmp_path / "job", schema=SCHEMA + extra + DEFAULT)
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}"):
        build(addition(job, one / "log-1", one / "dataset"))


def process(job: Path, log: Path, dataset: Path, *more: str) -> subprocess.Popen[str]:
    """Start an append in a process of its own."""
    command = [sys.executable, "-m", "pipelines", "append", str(job), "--json"]
    return subprocess.Popen(
        [*command, "--dataset", str(dataset), "--input", str(log), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_append_at_once_and_none_is_lost(one: Path, tmp_path: Path) -> None:
    dataset, job = copy_of(one / "dataset", tmp_path / "dataset"), one / "job" / "job.yaml"
    both = [process(job, one / f"log-{i}", dataset, "--position", str(i)) for i in (1, 2)]
    for running in both:
        out, err = running.communicate(timeout=240)
        assert running.returncode == 0, err
        assert json.loads(out)["built"]
    opened = open_dataset(dataset)
    assert [s.manifest.position for s in opened.segments] == [0, 1, 2]
    assert opened.indexes[0].manifest.segments == tuple(s.manifest.id for s in opened.segments)
    assert verify(dataset)["problems"] == []
    again = copy_of(one / "dataset", tmp_path / "again")
    for position in (1, 2):
        build(addition(job, one / f"log-{position}", again, position))
    assert open_dataset(again).manifest == opened.manifest


def test_append_that_meets_a_faster_one_takes_the_place_after_it(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, job = copy_of(one / "dataset", tmp_path / "dataset"), one / "job" / "job.yaml"
    replace_root = module.replace_root

    def late(*arguments: object) -> bool:
        monkeypatch.setattr(module, "replace_root", replace_root)
        build(addition(job, one / "log-2", dataset, attempt="faster"))
        return replace_root(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "replace_root", late)
    build(addition(job, one / "log-1", dataset))
    listings = [s.manifest.listing for s in open_dataset(dataset).segments]
    assert [sum(f.num_bytes for f in listing) for listing in listings[1:]] == [
        sum(f.stat().st_size for f in (one / log).iterdir()) for log in ("log-2", "log-1")
    ]
    assert verify(dataset)["problems"] == []
    assert not list(dataset.glob(".*"))
    assert not list((dataset / SEGMENTS).glob(".*"))


def test_segment_that_was_renamed_but_not_named_by_the_root_is_taken_over(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, job = copy_of(one / "dataset", tmp_path / "dataset"), one / "job" / "job.yaml"
    before = open_dataset(dataset).manifest

    def killed(root: Path, *rest: object) -> object:
        if root == dataset:  # the segment has its name by now, the root is still the old one
            raise KeyboardInterrupt
        return commit_root(root, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(module, "commit_root", killed)
        with pytest.raises(KeyboardInterrupt):
            build(addition(job, one / "log-1", dataset))
    assert open_dataset(dataset).manifest == before
    said: list[str] = []
    build(replace(addition(job, one / "log-1", dataset), say=said.append))
    assert verify(dataset)["problems"] == []
    assert "segment finished by an attempt that died: taken over" in said
    other = copy_of(one / "dataset", tmp_path / "other")
    build(addition(job, one / "log-1", other))
    assert open_dataset(other).manifest == open_dataset(dataset).manifest
