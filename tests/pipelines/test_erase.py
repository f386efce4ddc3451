"""Forgetting: weight 0 at once, no byte left after the rewriting, one dataset or the other."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.build import build
from presage.pipelines.cli import main
from presage.pipelines.table.verify import verify
from presage.schemas.dataset.manifest import read_dataset
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.dataset.samples import read_samples
from presage.schemas.storage.leases import Lease
from presage.schemas.storage.location import MANIFESTS, Location
from tests.id_search import files_with_id
from tests.pipelines.appending import KILLED_AT, addition, changed
from tests.pipelines.logs import (
    IN_PROCESS,
    bytes_of,
    copy_of,
    raw_rows,
    request,
    unnamed_places,
    vacuum_later,
)
from tests.shared import with_long

ID = 7_305_946_128
USER = ID * 7 + 3
JOB_CHANGES = (
    ("groups: {user", "vocabularies: {seen: {columns: [history], num_rows: 500}}\n  groups: {user"),
    (
        "len(history))}}",
        "len(history)), rows: {vocabulary: {name: seen, column: history}}}}",
    ),
    (
        "items: {features: [item, history], rows: identity, num_rows: 1000}",
        "items: {features: [item], rows: identity, num_rows: 1000}\n"
        "    seen: {features: [rows], rows: identity, num_rows: 500}\n"
        "    sessions: {features: [session], rows: identity, num_rows: 9223372036854775807}",
    ),
)


def log_with(directory: Path, seed: int, drop: tuple[int, ...] = ()) -> Path:
    """Write a log in which session 4 is a distinctive one, some sessions dropped, one bad row."""
    rows = raw_rows(240, seed)
    session = np.where(rows["session"].to_numpy() == 4, ID, rows["session"].to_numpy())
    history = [
        [ID + 1, *h] if s == ID else h
        for s, h in zip(session.tolist(), rows["history"].to_pylist(), strict=True)
    ]
    rows = rows.set_column(0, "session", pa.array(session))
    rows = rows.set_column(2, "user", pa.array(session * 7 + 3))
    rows = rows.set_column(3, "history", pa.array(history, pa.list_(pa.int64())))
    bad = rows.slice(0, 1).to_pylist()[0] | {"session": ID, "items": [5000]}  # out of its table
    if ID not in drop:
        rows = pa.concat_tables([rows, pa.Table.from_pylist([bad], schema=rows.schema)])
    rows = rows.filter(pa.array(~np.isin(rows["session"].to_numpy(), drop)))
    directory.mkdir(parents=True)
    pq.write_table(rows, directory / "log.parquet", row_group_size=50)
    return directory


def job_of(directory: Path) -> Path:
    """Write a job with a vocabulary, and the session key looked up in a table of identity."""
    job = changed(directory, *JOB_CHANGES)
    schema = (directory / "schema.pbtxt").read_text()
    for name, old, new in (("session", "kept", "sparse"), ("history", "sparse", "kept")):
        head, found, tail = schema.partition(f'"{name}" type')
        assert found
        schema = head + found + tail.replace(f'"{old}"', f'"{new}"', 1)
    rows = (
        'feature { name: "rows" type: INT value_count { min: 0 } annotation { tag: "sparse" } }\n'
    )
    (directory / "schema.pbtxt").write_text(schema + rows)
    return job


def two_segments(directory: Path, drop: tuple[int, ...] = ()) -> Path:
    """Build a dataset of two segments, without some sessions."""
    job = job_of(directory / "job")
    dataset = directory / "dataset"
    build(request(job, log_with(directory / "log-0", 0, drop), dataset))
    build(addition(job, log_with(directory / "log-1", 1, drop), dataset))
    return dataset


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two segments that know the id, not to be changed."""
    return two_segments(tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of the same logs without the id's rows, not to be changed."""
    return two_segments(tmp_path_factory.mktemp("without"), drop=(ID,))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    """Run `erase` and return what it prints."""
    assert main(["erase", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def ids_file(directory: Path, *ids: object) -> str:
    """Write ids as text, one a line."""
    path = directory / "ids.txt"
    path.write_text("".join(f"{i}\n" for i in ids))
    return str(path)


def sessions(dataset: Path) -> list[int]:
    """Return the session of each sample that the dataset hands out."""
    tables = pa.concat_tables(read_samples(open_dataset(dataset)))
    return tables["session"].to_pylist()


def rows_of(dataset: Path) -> pa.Table:
    """Return all samples with the columns of transforms, but for rows of vocabularies."""
    tables = pa.concat_tables(read_samples(open_dataset(dataset), model_inputs=True))
    return tables.drop_columns(["rows"])


@pytest.mark.slow
def test_erase_leaves_samples_out_at_once_and_touches_no_data_file(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = copy_of(two, tmp_path / "dataset")
    before, kept = bytes_of(dataset), [s for s in sessions(two) if s != ID]
    found = run(capsys, str(dataset), "--ids", ids_file(tmp_path, ID, 999_999))["erased"]
    assert found["num_samples"] == len(sessions(two)) - len(kept) > 0
    assert sessions(dataset) == kept
    assert verify(dataset)["problems"] == []
    after = bytes_of(dataset)
    assert {p for p in before if after[p] != before[p]} == {MANIFESTS}
    (added,) = after.keys() - before.keys()
    assert added.startswith("tombstones/")
    assert files_with_id(dataset / "tombstones", ID) == []
    assert run(capsys, str(dataset), "--ids", ids_file(tmp_path, ID))["erased"]["num_ids"] == 1
    assert bytes_of(dataset) == after


def test_view_leaves_erased_samples_out(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = copy_of(two, tmp_path / "dataset")
    run(capsys, str(dataset), "--ids", ids_file(tmp_path, ID))
    monkeypatch.chdir(dataset)
    with duckdb.connect() as connection:
        connection.execute((dataset / "view.sql").read_text())
        found = connection.execute("SELECT session FROM samples").fetchall()
    assert sorted(row[0] for row in found) == sorted(sessions(dataset))
    assert len(found) < len(sessions(two))


def test_erase_finds_ids_in_lists_and_in_parquet(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = copy_of(two, tmp_path / "dataset")
    ids = tmp_path / "ids.parquet"
    pq.write_table(pa.table({"history": pa.array([ID + 1])}), ids)
    found = run(capsys, str(dataset), "--ids", str(ids), "--column", "history")["erased"]
    assert found["num_samples"] == sessions(two).count(ID)
    assert ID not in sessions(dataset)


@pytest.mark.slow
def test_append_keeps_tombstones_in_force(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = copy_of(two, tmp_path / "dataset")
    run(capsys, str(dataset), "--ids", ids_file(tmp_path, ID))
    job = two.parent / "job" / "job.yaml"
    build(addition(job, log_with(tmp_path / "log-2", 2, drop=(ID,)), dataset))
    assert main(["oracle", str(dataset), "--reindex", "--epochs", "2", IN_PROCESS]) == 0
    assert ID not in sessions(dataset)


@pytest.mark.slow
def test_rewritten_dataset_holds_the_id_in_no_byte(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = copy_of(two, tmp_path / "dataset")
    for value in (ID, ID + 1, USER):
        assert files_with_id(dataset, value)
    for part in ("tuples", "statistics", "vocabularies", "edges", "rejects"):
        names = {name for value in (ID, ID + 1) for name in files_with_id(dataset, value)}
        assert any(part in name for name in names), (part, names)
    run(capsys, str(dataset), "--ids", ids_file(tmp_path, ID))
    assert files_with_id(dataset, ID)
    found = run(capsys, str(dataset), "--rewrite")["rewritten"]
    assert len(found["segments"]) == 2
    assert verify(dataset)["problems"] == []
    for value in (ID, ID + 1, USER):
        assert files_with_id(dataset, value) == []
    assert read_dataset(dataset).tombstones_sha256 is None
    after = bytes_of(dataset)
    again = run(capsys, str(dataset), "--rewrite")["rewritten"]
    assert again == {"segments": {}, "num_samples": 0, "removed": 0}
    assert bytes_of(dataset) == after


@pytest.mark.slow
def test_rewritten_segment_has_the_bytes_of_one_built_without_the_id(
    two: Path, without: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = copy_of(two, tmp_path / "dataset")
    run(capsys, str(dataset), "--ids", ids_file(tmp_path, ID), "--rewrite")
    assert rows_of(dataset).equals(rows_of(without))
    pairs = zip(open_dataset(dataset).segments, open_dataset(without).segments, strict=True)
    for ours, theirs in pairs:
        mine, wanted = bytes_of(ours.directory), bytes_of(theirs.directory)
        assert mine.keys() == wanted.keys()
        same = {path for path in mine if mine[path] == wanted[path]}
        assert {
            p for p in mine if p.startswith(("samples/", "access/items", "edges/items"))
        } <= same


def test_rewriting_waits_for_the_age_of_tombstones(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = copy_of(two, tmp_path / "dataset")
    vacuum_later(dataset)  # the index from before the second segment
    run(capsys, str(dataset), "--ids", ids_file(tmp_path, ID))
    before = bytes_of(dataset)
    assert (
        run(capsys, str(dataset), "--rewrite", "--older-than", "7d")["rewritten"]["segments"] == {}
    )
    assert bytes_of(dataset) == before


@pytest.mark.slow
def test_rewriting_drops_a_segment_of_which_nothing_is_left(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = copy_of(two, tmp_path / "dataset")
    first, _ = open_dataset(dataset).segments
    gone = pa.concat_tables(read_samples(open_dataset(dataset)))["session"].to_pylist()
    head = set(gone[: first.manifest.num_samples])
    left = len([s for s in gone[first.manifest.num_samples :] if s not in head])
    ids = ids_file(tmp_path, *sorted(head))
    found = run(capsys, str(dataset), "--ids", ids, "--rewrite")["rewritten"]
    assert found["segments"][first.id] is None
    assert len(open_dataset(dataset).segments) == bool(left)
    assert len(sessions(dataset)) == left


def test_rewriting_of_a_dataset_that_is_read_is_refused(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = copy_of(two, tmp_path / "dataset")
    run(capsys, str(dataset), "--ids", ids_file(tmp_path, ID))
    before = bytes_of(dataset)
    with Lease(Location.parse(dataset), "run runs/1") as lease:
        lease.hold([segment.directory.name for segment in open_dataset(dataset).segments])
        assert main(["erase", str(dataset), "--rewrite"]) == 1
    assert capsys.readouterr().err == (
        f"error: dataset is in use by run runs/1 in {dataset}/_leases; "
        "stop it, or try again when it has ended\n"
    )
    assert bytes_of(dataset) == before
    assert len(run(capsys, str(dataset), "--rewrite")["rewritten"]["segments"]) == 2


REFUSED = {
    "neither ids nor rewriting": ([], "erase needs --ids or --rewrite; .*"),
    "no such column": (["--ids", "IDS", "--column", "sesion"], r".* did you mean 'session'\?"),
    "a label": (["--ids", "IDS", "--column", "label"], "--column must be the session key, .*"),
    "no number": (["--ids", "BAD"], "ids are not values of 'session', which is int64: .*"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_erase_refuses_what_does_not_fit(
    arguments: list[str], message: str, two: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "bad.txt").write_text("x\n")
    places = {"IDS": ids_file(tmp_path, 3), "BAD": str(tmp_path / "bad.txt")}
    assert main(["erase", str(two), *(places.get(a, a) for a in arguments)]) == 1
    assert re.fullmatch(f"error: {message}\n", capsys.readouterr().err)


POINTS = {
    "between two segments": ("compact", "compact_segment", 1),
    "before the index": ("indexes", "index_tables", 0),
    "before the root": ("compact", "commit_manifest", 0),
    "after the root, before old files go": ("compact", "remove_replaced", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("point", with_long(POINTS, "before the index", "between two segments"))
def test_rewriting_that_is_killed_leaves_a_dataset_and_can_be_run_again(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], point: str
) -> None:
    dataset = copy_of(two, tmp_path / "dataset")
    run(capsys, str(dataset), "--ids", ids_file(tmp_path, ID))
    module, function, before = POINTS[point]
    script = KILLED_AT.format(
        module=f"presage.pipelines.table.{module}", function=function, before=before
    )
    command = [sys.executable, "-c", script, "erase", str(dataset), "--rewrite"]
    killed = subprocess.run(command, env=os.environ, capture_output=True, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert verify(dataset)["problems"] == []
    assert ID not in sessions(dataset)
    run(capsys, str(dataset), "--rewrite")
    assert verify(dataset)["problems"] == []
    for value in (ID, ID + 1):
        assert files_with_id(dataset, value) == []
    vacuum_later(dataset)
    assert unnamed_places(dataset) == []
