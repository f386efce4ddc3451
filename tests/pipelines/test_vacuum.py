"""What `vacuum` keeps: what roots name, leases, what is young; and nothing that was claimed."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipelines import build as build_module
from pipelines.build import build
from pipelines.cli import main
from pipelines.table import commit as commit_module
from pipelines.table import delete, indexes
from pipelines.table import vacuum as vacuum_module
from pipelines.table.commit import claim, seal, take_over
from pipelines.table.vacuum import vacuum
from pipelines.table.verify import verify
from schemas import dataset as dataset_module
from schemas import leases
from schemas.dataset import open_dataset, open_root
from schemas.errors import SchemaError
from schemas.layout import SEGMENTS
from schemas.leases import Lease
from schemas.manifest import DatasetManifest, find_root, read_dataset
from schemas.storage import MANIFESTS, Entry, Location, store_time
from tests.pipelines.appending import addition, changed, with_logs
from tests.pipelines.logs import (
    IN_PROCESS,
    bytes_of,
    copy_of,
    segment_directory,
    unnamed_places,
)

KEY = "0123456789ab"
HOUR = 3600.0


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with job, three logs and a dataset of the first; not to be changed."""
    return with_logs(tmp_path_factory.mktemp("one"))


@pytest.fixture
def dataset(one: Path, tmp_path: Path) -> Path:
    """A dataset of one segment, written an hour ago, with a complete copy that nothing names."""
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    copy_of(segment_directory(dataset), dataset / SEGMENTS / f"{KEY}-dead")
    (dataset / SEGMENTS / f"{KEY}-dead" / "claim").unlink()
    age(dataset, HOUR)
    return dataset


def age(directory: Path, seconds: float) -> None:
    """Let all files below a directory be so much older."""
    for path in directory.rglob("*"):
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))


LEFT = [f"{SEGMENTS}/{KEY}-dead"]


def test_unnamed_segment_is_kept_for_the_given_time(dataset: Path) -> None:
    before = bytes_of(dataset)
    for seconds, left in ((2 * HOUR, LEFT), (HOUR / 2, [])):
        vacuum(Location.parse(dataset), timedelta(seconds=seconds))
        assert unnamed_places(dataset) == left
    assert bytes_of(dataset) == before
    assert verify(dataset)["problems"] == []


def test_one_young_file_keeps_its_directory(dataset: Path) -> None:
    (dataset / LEFT[0] / "samples" / "00001.parquet").write_bytes(b"half")
    vacuum(Location.parse(dataset), timedelta(seconds=HOUR / 2))
    assert unnamed_places(dataset) == LEFT


@pytest.mark.parametrize("offset", [-2 * HOUR, 2 * HOUR])
def test_clock_of_the_store_decides(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, offset: float
) -> None:
    """Files have the time of the store; that of the host may be wrong by hours."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + offset)
    vacuum(Location.parse(dataset), timedelta(seconds=HOUR * 1.5))
    assert unnamed_places(dataset) == LEFT
    vacuum(Location.parse(dataset), timedelta(seconds=HOUR / 2))
    assert unnamed_places(dataset) == []


def test_lease_keeps_what_a_run_reads(dataset: Path) -> None:
    location = Location.parse(dataset)
    with Lease(location, "run runs/1") as lease:
        lease.hold([f"{KEY}-dead"])
        age(dataset, 2 * HOUR)
        for path in (dataset / "_leases").iterdir():  # renewed meanwhile
            os.utime(path)
        vacuum(location, timedelta())
        assert unnamed_places(dataset) == LEFT
    vacuum(location, timedelta())
    assert unnamed_places(dataset) == []


def test_lease_that_nobody_renews_expires(dataset: Path) -> None:
    location = Location.parse(dataset)
    with Lease(location, "run runs/1", expiry_sec=HOUR) as lease:
        lease.hold([f"{KEY}-dead"])
        vacuum(location, timedelta())
        assert unnamed_places(dataset) == LEFT
        age(dataset / "_leases", 2 * HOUR)
        vacuum(location, timedelta())
        assert unnamed_places(dataset) == []


def test_replaced_root_keeps_what_it_names_for_the_given_time(dataset: Path) -> None:
    location, before = Location.parse(dataset), read_dataset(dataset)
    seal(location)
    vacuum(location, timedelta(seconds=HOUR / 2))  # it was replaced a moment ago
    first = dataset / MANIFESTS / "00000001.json"
    assert first.stat().st_size
    assert len(open_root(location, before).segments) == 1
    vacuum(location, timedelta())
    assert first.stat().st_size == 0  # its number is never used again
    assert read_dataset(dataset).sealed
    assert verify(dataset)["problems"] == []


def test_directory_is_claimed_once(dataset: Path) -> None:
    location = Location.parse(dataset)
    directory = location / LEFT[0]
    assert take_over(location, KEY, "one") == directory
    assert take_over(location, KEY, "two") is None
    assert not claim(directory, "two")
    assert claim(directory, "one")  # its own claim again, after a reply was lost


def test_leased_or_incomplete_directory_is_not_taken_over(dataset: Path) -> None:
    location = Location.parse(dataset)
    with Lease(location, "build other") as lease:
        lease.hold([f"{KEY}-dead"])
        assert take_over(location, KEY, "one") is None
    (dataset / LEFT[0] / "MANIFEST.json").unlink()
    assert take_over(location, KEY, "one") is None


def sweeping(dataset: Path, call: Callable[..., object]) -> Callable[..., object]:
    """Return a function that sweeps a dataset before it calls another."""

    def swept(*arguments: object) -> object:
        vacuum(Location.parse(dataset), timedelta())
        return call(*arguments)

    return swept


@pytest.mark.parametrize("function", ["finish_segment", "new_segment", "commit_segment"])
def test_build_in_progress_is_not_swept(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    swept = sweeping(dataset, getattr(build_module, function))
    monkeypatch.setattr(build_module, function, swept)
    build(addition(one / "job" / "job.yaml", one / "log-1", dataset))
    assert len(open_dataset(dataset).segments) == 2
    assert verify(dataset)["problems"] == []
    assert unnamed_places(dataset) == []


@pytest.mark.parametrize("function", ["_next_manifest", "claim", "commit_root"])
def test_build_that_was_swept_in_spite_of_its_lease_commits_nothing(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """A host that is suspended for longer than its lease is valid."""
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    before, call = bytes_of(dataset), getattr(commit_module, function)

    def late(*arguments: object) -> object:
        monkeypatch.setattr(commit_module, function, call)
        age(dataset / "_leases", 2 * HOUR)
        vacuum(Location.parse(dataset), timedelta())
        return call(*arguments)

    monkeypatch.setattr(commit_module, function, late)
    with pytest.raises(SchemaError):
        build(addition(one / "job" / "job.yaml", one / "log-1", dataset))
    assert bytes_of(dataset) == before
    assert verify(dataset)["problems"] == []
    build(addition(one / "job" / "job.yaml", one / "log-1", dataset, attempt="again"))
    assert verify(dataset)["problems"] == []


def test_vacuum_of_no_dataset_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vacuum", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("error: there is no dataset: no build was committed")


def test_build_whose_directory_is_being_removed_commits_nothing(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the root and its manifest after the commit of `vacuum`, but before the removal."""
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    before, unnamed = bytes_of(dataset), dict[str, list[Entry]]()

    def claimed_before(*arguments: Any) -> Any:
        location = Location.parse(dataset)
        if not unnamed:
            age(dataset / "_leases", 2 * HOUR)
            unnamed.update(vacuum_module._claim_unnamed(location, *[store_time(location)] * 2))
        return find_root(*arguments)

    def removed_before(*arguments: Any) -> bool:
        vacuum_module._remove(Location.parse(dataset), unnamed)
        return claim(*arguments)

    monkeypatch.setattr(commit_module, "find_root", claimed_before)
    monkeypatch.setattr(commit_module, "claim", removed_before)
    with pytest.raises(SchemaError, match="claimed by another process"):
        build(addition(one / "job" / "job.yaml", one / "log-1", dataset))
    assert [place.partition("/")[0] for place in unnamed] == [SEGMENTS]
    assert verify(dataset)["problems"] == []
    assert bytes_of(dataset) == before


@pytest.mark.parametrize(
    ("module", "function"), [(delete, "commit_root"), (delete, "write_copies")]
)
def test_tombstones_that_are_about_to_be_committed_are_kept(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, function: str
) -> None:
    monkeypatch.setattr(module, function, sweeping(dataset, getattr(module, function)))
    (tmp_path / "ids").write_text("1\n2\n3\n")
    assert main(["erase", str(dataset), "--ids", str(tmp_path / "ids")]) == 0
    assert verify(dataset)["problems"] == []
    assert unnamed_places(dataset) == []


def test_job_that_is_used_again_outlasts_a_slow_vacuum(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vacuum` has listed the files; the job of the first segment is named again meanwhile."""
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    other = changed(tmp_path / "other", ("00:08:00", "00:09:00"))
    build(addition(other, one / "log-1", dataset))
    remove = vacuum_module._remove

    def late(*arguments: Any) -> None:
        build(addition(one / "job" / "job.yaml", one / "log-2", dataset, attempt="again"))
        remove(*arguments)

    monkeypatch.setattr(vacuum_module, "_remove", late)
    age(dataset, 2 * HOUR)
    vacuum(Location.parse(dataset), timedelta(seconds=HOUR))
    assert len(open_dataset(dataset).segments) == 3
    assert verify(dataset)["problems"] == []


def test_index_of_a_process_whose_lease_expired_is_not_committed(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["oracle", str(dataset), "--reindex", "--epochs", "2", IN_PROCESS]
    update = indexes.update_root

    def suspended(*arguments: Any) -> Any:
        monkeypatch.setattr(indexes, "update_root", update)
        time.sleep(0.3)
        vacuum(Location.parse(dataset), timedelta())
        return update(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(leases._Body, "renew", lambda _: None)
        patch.setattr(indexes, "Lease", partial(Lease, expiry_sec=0.2))
        patch.setattr(indexes, "update_root", suspended)
        assert main(command) == 1
    assert verify(dataset)["problems"] == []
    assert main(command) == 0
    assert verify(dataset)["problems"] == []


def test_reader_opens_the_newest_version_if_files_of_its_version_are_removed(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    with_day = replace(addition(one / "job" / "job.yaml", one / "log-1", dataset), day="2026-01-02")
    build(with_day)
    open_version = dataset_module.open_root

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(dataset_module, "open_root", open_version)
        build(replace(with_day, input_root=one / "log-2", replaces=True, attempt="new"))
        vacuum(Location.parse(dataset), timedelta())
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
    with_day = replace(addition(one / "job" / "job.yaml", one / "log-1", dataset), day="2026-01-02")
    write_copies, manifests = commit_module.write_copies, list[DatasetManifest]()

    def replaced_before(*arguments: Any) -> None:
        monkeypatch.setattr(commit_module, "write_copies", write_copies)
        manifests.append(read_dataset(dataset))
        build(replace(with_day, input_root=one / "log-2", replaces=True, attempt="new"))
        write_copies(*arguments)

    monkeypatch.setattr(commit_module, "write_copies", replaced_before)
    with pytest.raises(SchemaError, match="was committed, and another process has replaced it"):
        build(with_day)
    vacuum(Location.parse(dataset), timedelta(seconds=HOUR))
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
        vacuum(location, timedelta())
    monkeypatch.setattr(Location, "write_bytes", write)
    vacuum(location, timedelta())
    sizes = [path.stat().st_size for path in sorted((dataset / MANIFESTS).glob("0*.json"))]
    assert [size > 0 for size in sizes][:-2] == [False] * (len(sizes) - 2)
