"""What `vacuum` keeps: what roots and leases name, and what is young."""

import re
import time
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from presage.pipelines import build as build_module
from presage.pipelines.build import build
from presage.pipelines.cli import main
from presage.pipelines.table import commit as commit_module
from presage.pipelines.table import delete, indexes
from presage.pipelines.table import root as root_module
from presage.pipelines.table import vacuum as vacuum_module
from presage.pipelines.table.commit import seal
from presage.pipelines.table.root import MIN_AGE
from presage.pipelines.table.vacuum import vacuum
from presage.pipelines.table.verify import verify
from presage.pipelines.transforms import fit
from presage.schemas.dataset import opened as dataset_module
from presage.schemas.dataset.manifest import DatasetManifest, read_dataset
from presage.schemas.dataset.opened import open_dataset, open_root
from presage.schemas.errors import SchemaError
from presage.schemas.layout import SEGMENTS, TOMBSTONES_SCHEMA
from presage.schemas.storage.leases import Lease
from presage.schemas.storage.location import MANIFESTS, Location
from presage.schemas.storage.probes import store_time
from presage.schemas.storage.versions import Versions
from tests.foreign import add_foreign, assert_untouched
from tests.pipelines.appending import addition, changed, with_logs
from tests.pipelines.logs import (
    IN_PROCESS,
    age,
    bytes_of,
    copy_of,
    segment_directory,
    unnamed_places,
    vacuum_later,
)

KEY = "0123456789ab"
DAY = 86_400.0


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with job, three logs and a dataset of the first; not to be changed."""
    return with_logs(tmp_path_factory.mktemp("one"))


@pytest.fixture
def dataset(one: Path, tmp_path: Path) -> Path:
    """A dataset of one segment, written 8 days ago, with a complete copy that nothing names."""
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    copy_of(segment_directory(dataset), dataset / SEGMENTS / f"{KEY}-dead")
    age(dataset, 8 * DAY)
    return dataset


LEFT = [f"{SEGMENTS}/{KEY}-dead"]


def test_unnamed_segment_is_kept_for_the_given_time(dataset: Path) -> None:
    before = bytes_of(dataset)
    for days, left in ((9, LEFT), (7, [])):
        vacuum(Location.parse(dataset), timedelta(days=days))
        assert unnamed_places(dataset) == left
    assert bytes_of(dataset) == before
    assert verify(dataset)["problems"] == []


def test_time_below_a_week_is_refused(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vacuum", str(dataset), "--older-than", "6d"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --older-than must be at least 7d, got 6 days, 0:00:00: younger")
    assert unnamed_places(dataset) == LEFT


def test_one_young_file_keeps_its_directory(dataset: Path) -> None:
    (dataset / LEFT[0] / "samples" / "00001.parquet").write_bytes(b"half")
    vacuum(Location.parse(dataset))
    assert unnamed_places(dataset) == LEFT


@pytest.mark.parametrize("offset", [-30 * DAY, 30 * DAY])
def test_clock_of_the_store_decides(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, offset: float
) -> None:
    """Files have the time of the store; that of the host may be wrong by days."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + offset)
    vacuum(Location.parse(dataset), timedelta(days=9))
    assert unnamed_places(dataset) == LEFT
    vacuum(Location.parse(dataset))
    assert unnamed_places(dataset) == []


def test_lease_keeps_what_a_run_reads_until_it_is_released_or_expires(dataset: Path) -> None:
    location = Location.parse(dataset)
    with Lease(location, "run runs/1") as lease:
        lease.hold([f"{KEY}-dead"])
        vacuum(location)
        assert unnamed_places(dataset) == LEFT
    with Lease(location, "run runs/1", expiry_sec=DAY) as lease:
        lease.hold([f"{KEY}-dead"])
        vacuum_later(dataset, days=0.5)
        assert unnamed_places(dataset) == LEFT
        vacuum_later(dataset, days=1.5)
        assert unnamed_places(dataset) == []


def test_replaced_root_keeps_what_it_names_for_the_given_time(dataset: Path) -> None:
    location, before = Location.parse(dataset), read_dataset(dataset)
    seal(location)
    vacuum(location)  # it was replaced a moment ago
    first = dataset / MANIFESTS / "00000001.json"
    assert first.stat().st_size
    assert len(open_root(location, before).segments) == 1
    vacuum_later(dataset)
    assert first.stat().st_size == 0  # its number is never used again
    assert read_dataset(dataset).sealed
    assert verify(dataset)["problems"] == []


def test_superseded_versions_are_not_read_where_they_decide_nothing(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An append a day leaves as many versions as segments."""
    vacuum(Location.parse(dataset))
    seal(Location.parse(dataset))
    with monkeypatch.context() as patch:
        patch.setattr(Versions, "read", lambda *_: pytest.fail("a superseded version is read"))
        vacuum(Location.parse(dataset))
        vacuum_later(dataset)
    assert verify(dataset)["problems"] == []


@pytest.mark.parametrize(
    ("module", "function"),
    [("build", "finish_segment"), ("build", "commit_segment"), ("table.commit", "commit_manifest")],
)
def test_build_in_progress_is_not_swept(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, function: str
) -> None:
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    target = import_module(f"presage.pipelines.{module}")
    call = getattr(target, function)

    def swept(*arguments: object) -> object:
        vacuum_later(dataset, days=6.5)
        return call(*arguments)

    monkeypatch.setattr(target, function, swept)
    build(addition(one / "job" / "job.yaml", one / "log-1", dataset))
    assert len(open_dataset(dataset).segments) == 2
    assert verify(dataset)["problems"] == []
    assert unnamed_places(dataset) == []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("_next_manifest", "missing"),
        ("commit_manifest", "file of this attempt was removed before the commit in "),
    ],
)
def test_build_that_was_swept_commits_nothing(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, message: str
) -> None:
    """A host that is suspended for a week."""
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    before, call = bytes_of(dataset), getattr(commit_module, function)

    def late(*arguments: object) -> object:
        monkeypatch.setattr(commit_module, function, call)
        vacuum_later(dataset)
        return call(*arguments)

    monkeypatch.setattr(commit_module, function, late)
    with pytest.raises(SchemaError, match=message):
        build(addition(one / "job" / "job.yaml", one / "log-1", dataset))
    assert bytes_of(dataset) == before
    assert verify(dataset)["problems"] == []
    assert unnamed_places(dataset) == []
    build(addition(one / "job" / "job.yaml", one / "log-1", dataset, attempt="a9a19a9a1a9a"))
    assert verify(dataset)["problems"] == []


@pytest.mark.parametrize("function", ["_check_written", "commit_root"])
def test_build_that_is_suspended_in_its_commit_while_vacuum_begins_commits_nothing(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """`vacuum` has found the files and committed, but has not removed them yet."""
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    location, before = Location.parse(dataset), bytes_of(dataset)
    call, found = getattr(root_module, function), list[list[str]]()

    def suspended(*arguments: object) -> object:
        if not found:
            for place in unnamed_places(dataset):
                age(dataset / place, 8 * DAY)
            _, unnamed = vacuum_module._supersede_unnamed(location, MIN_AGE, store_time(location))
            found.append(sorted(unnamed))
        return call(*arguments)

    monkeypatch.setattr(root_module, function, suspended)
    with pytest.raises(SchemaError, match=r"last file of the attempt is .* old, more than 6 days"):
        build(addition(one / "job" / "job.yaml", one / "log-1", dataset))
    assert [place.partition("/")[0][:6] for place in found[0]] == ["index-", SEGMENTS[:6]]
    assert bytes_of(dataset) == before
    assert verify(dataset)["problems"] == []


@pytest.mark.parametrize("name", ["samples/00000.parquet", "blocks.parquet", "MANIFEST.json"])
def test_commit_names_the_file_that_is_missing(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    commit, (kept,) = commit_module.commit_manifest, (dataset / SEGMENTS).iterdir()

    def damaged(*arguments: Any) -> Any:
        (new,) = (path for path in (dataset / SEGMENTS).iterdir() if path != kept)
        (new / name).unlink()
        return commit(*arguments)

    monkeypatch.setattr(commit_module, "commit_manifest", damaged)
    message = rf"file of this attempt was removed before the commit in .*/{name}; run the command"
    with pytest.raises(SchemaError, match=message):
        build(addition(one / "job" / "job.yaml", one / "log-1", dataset))
    assert unnamed_places(dataset) == []


def test_vacuum_of_no_dataset_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vacuum", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("error: there is no dataset: no build was committed")


@pytest.mark.parametrize("function", ["commit_manifest", "write_copies"])
def test_tombstones_that_are_about_to_be_committed_are_kept(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    call = getattr(delete, function)

    def swept(*arguments: object) -> object:
        vacuum_later(dataset, days=6.5)
        return call(*arguments)

    monkeypatch.setattr(delete, function, swept)
    (tmp_path / "ids").write_text("1\n2\n3\n")
    assert main(["erase", str(dataset), "--ids", str(tmp_path / "ids")]) == 0
    assert verify(dataset)["problems"] == []
    assert unnamed_places(dataset) == []


def test_tombstones_and_vocabularies_of_a_dead_attempt_are_not_written_again(
    dataset: Path,
) -> None:
    """`vacuum` may have found the old file, and remove it after it was written again."""
    location = Location.parse(dataset)
    assert fit.free_path(location, "vocabularies/x/00000-0a.parquet").endswith("/00000-0a.parquet")
    (location / "vocabularies/x/00000-0a.parquet").write_bytes(b"")
    path = fit.free_path(location, "vocabularies/x/00000-0a.parquet")
    assert re.fullmatch(r"vocabularies/x/00000-0a-[0-9a-f]{6}\.parquet", path)
    rows = TOMBSTONES_SCHEMA.empty_table().to_pydict()
    table = pa.table({name: [None] for name in rows}, TOMBSTONES_SCHEMA)
    root = read_dataset(dataset)
    first = delete.write_tombstones(location, table, root)
    assert delete.write_tombstones(location, table, root) != first
    assert delete.write_tombstones(location, table, replace(root, tombstones_sha256=first)) == first


def test_job_that_is_used_again_outlasts_a_slow_vacuum(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vacuum` has listed the files; the job of the first segment is named again meanwhile."""
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    other = changed(tmp_path / "other", ("00:08:00", "00:09:00"))
    build(addition(other, one / "log-1", dataset))
    find = vacuum_module._supersede_unnamed

    def late(*arguments: Any) -> Any:
        found = find(*arguments)
        build(addition(one / "job" / "job.yaml", one / "log-2", dataset, attempt="a9a19a9a1a9a"))
        return found

    monkeypatch.setattr(vacuum_module, "_supersede_unnamed", late)
    age(dataset, 8 * DAY)
    vacuum(Location.parse(dataset))
    assert len(open_dataset(dataset).segments) == 3
    assert verify(dataset)["problems"] == []


def test_index_of_a_process_that_was_suspended_is_not_committed(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["oracle", str(dataset), "--reindex", "--epochs", "2", IN_PROCESS]
    update = indexes.update_root

    def suspended(*arguments: Any) -> Any:
        monkeypatch.setattr(indexes, "update_root", update)
        vacuum_later(dataset)
        return update(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(indexes, "update_root", suspended)
        assert main(command) == 1
    assert "file of this attempt was removed before the commit" in capsys.readouterr().err
    assert verify(dataset)["problems"] == []
    assert main(command) == 0
    assert verify(dataset)["problems"] == []


def test_reader_opens_the_newest_version_if_files_of_its_version_are_removed(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    job, day = one / "job" / "job.yaml", "2026-01-02"
    with_day = addition(job, one / "log-1", dataset, day=day)
    new_version = addition(
        job, one / "log-2", dataset, attempt="0e30e30e30e3", day=day, replaces=True
    )
    build(with_day)
    open_version = dataset_module.open_root

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(dataset_module, "open_root", open_version)
        build(new_version)
        vacuum_later(dataset)
        dataset_module.committed_segment.cache_clear()
        return open_version(*arguments)

    monkeypatch.setattr(dataset_module, "open_root", late)
    opened = open_dataset(dataset)
    assert opened.manifest == read_dataset(dataset)
    (opened.directory / "schema.pbtxt").stat()
    for path in (dataset / "segments").glob("*/MANIFEST.json"):
        path.unlink()
    dataset_module.committed_segment.cache_clear()
    with pytest.raises(SchemaError, match="manifest is missing"):
        open_dataset(dataset)


def test_segment_that_is_replaced_as_its_build_ends_is_kept_for_readers(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    job, day = one / "job" / "job.yaml", "2026-01-02"
    with_day = addition(job, one / "log-1", dataset, day=day)
    new_version = addition(
        job, one / "log-2", dataset, attempt="0e30e30e30e3", day=day, replaces=True
    )
    write_copies, manifests = build_module.write_copies, list[DatasetManifest]()

    def replaced_before(*arguments: Any) -> None:
        monkeypatch.setattr(build_module, "write_copies", write_copies)
        manifests.append(read_dataset(dataset))
        build(new_version)
        write_copies(*arguments)

    monkeypatch.setattr(build_module, "write_copies", replaced_before)
    with pytest.raises(SchemaError, match="was committed, and another process has replaced it"):
        build(with_day)
    vacuum(Location.parse(dataset))
    assert manifests != [read_dataset(dataset)]
    dataset_module.committed_segment.cache_clear()
    assert len(open_root(Location.parse(dataset), *manifests).segments) == 2


def test_vacuum_that_is_killed_leaves_no_version_behind(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = Location.parse(dataset)
    for _ in range(3):
        seal(location)
        seal(location, sealed=False)
    write, written = Location.write_bytes, list[str]()

    def killed(file: Location, data: bytes) -> None:
        if not data and len(written) == 2:
            raise KeyboardInterrupt
        written.extend([file.name] * (not data))
        write(file, data)

    monkeypatch.setattr(Location, "write_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        vacuum_later(dataset)
    monkeypatch.setattr(Location, "write_bytes", write)
    vacuum_later(dataset)
    sizes = [path.stat().st_size for path in sorted((dataset / MANIFESTS).glob("0*.json"))]
    assert [size > 0 for size in sizes][:-2] == [False] * (len(sizes) - 2)


def test_files_of_others_in_a_dataset_stay(dataset: Path) -> None:
    added = add_foreign(dataset)
    copy = copy_of(dataset / LEFT[0], dataset / SEGMENTS / "backup")
    added |= {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    age(dataset, 8 * DAY)
    location = Location.parse(dataset)
    assert vacuum(location, MIN_AGE)["segments"] == [f"{KEY}-dead"]
    assert vacuum(location, MIN_AGE)["segments"] == []
    assert_untouched(added)
    written = {p.name for p in (dataset / LEFT[0]).rglob("*") if p.is_file() and p not in added}
    assert written == set()
    assert verify(dataset)["problems"] == []
