"""Builds and appends that are killed, cut off from disk, or run twice: a segment, or none."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from presage.pipelines import executor
from presage.pipelines.build import build
from presage.pipelines.clustering import part
from presage.pipelines.clustering.part import LOOKUPS
from presage.pipelines.clustering.star import check_num_blocks
from presage.pipelines.prepare import BuildRequest
from presage.pipelines.table.expand import VIEW, view_sql
from presage.pipelines.table.verify import verify
from presage.schemas.dataset.manifest import find_root, read_dataset
from presage.schemas.dataset.opened import open_dataset, open_root
from presage.schemas.errors import SchemaError
from presage.schemas.layout import JOB
from presage.schemas.storage.location import Location
from tests.pipelines.appending import KILLED_AT, addition
from tests.pipelines.logs import (
    IN_PROCESS,
    PROCESSES,
    built,
    bytes_of,
    copy_of,
    request,
    unnamed_places,
    vacuum_later,
    write_job,
    write_log,
)
from tests.trainer.processes import children_of

PATIENCE_SEC = 500.0
"""Until a test gives up; nothing is measured."""
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
os.execv(sys.executable, [sys.executable, "-B", "-m", "pipelines", *sys.argv[1:]])
"""

POINTS = {
    "before the segment is finished": ("build", "finish_segment", 0),
    "before it is judged": ("table.commit", "pass_gate", 0),
    "before its index": ("table.indexes", "index_tables", 0),
    "before the root": ("table.root", "commit_root", 0),
    "after the root, before the copies of the new job": ("build", "write_copies", 0),
}
SHORT = ("before the segment is finished", "before the root")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a job, two logs and a dataset of the first; not to be changed."""
    directory = tmp_path_factory.mktemp("one")
    built(directory)
    write_log(directory / "log-1", num_rows=200, seed=1)
    job = write_job(directory / "job-1")
    job.write_text(job.read_text() + "schedule: {priority: 3}\n")  # another job file, same data
    build(appended(directory, copy_of(directory / "dataset", directory / "both")))
    return directory


def appended(one: Path, dataset: Path) -> BuildRequest:
    """Return the request that adds the second log."""
    return addition(one / "job-1" / "job.yaml", one / "log-1", dataset, attempt="again")


def command(one: Path, dataset: Path) -> list[str]:
    """Return the arguments of the append that is to be disturbed."""
    job = str(one / "job-1" / "job.yaml")
    return ["append", job, "--dataset", str(dataset), "--input", str(one / "log-1")]


CASES = [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.chaos]) for name in POINTS]


@pytest.mark.slow
@pytest.mark.parametrize("point", CASES)
def test_append_that_is_killed_leaves_a_dataset_and_can_be_run_again(
    one: Path, tmp_path: Path, point: str
) -> None:
    module, function, before = POINTS[point]
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    driver = KILLED_AT.format(
        module=f"presage.pipelines.{module}", function=function, before=before
    )
    done = subprocess.run(
        [sys.executable, "-c", driver, *command(one, dataset), IN_PROCESS],
        capture_output=True,
        timeout=PATIENCE_SEC,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    found = verify(dataset)
    assert found["problems"] == []
    expected = one / ("both" if function == "write_copies" else "dataset")
    assert bytes_of(dataset) == bytes_of(expected)
    build(appended(one, dataset))
    assert_equal_datasets(dataset, one / "both")


def assert_equal_datasets(found: Path, expected: Path) -> None:
    """Compare what the roots name, byte for byte, and that `vacuum` removes everything else."""
    assert verify(found)["problems"] == []
    assert bytes_of(found) == bytes_of(expected)
    assert (found / VIEW).read_text() == view_sql(open_dataset(found))
    assert (found / JOB).read_bytes() == (expected / JOB).read_bytes()
    vacuum_later(found)
    assert unnamed_places(found) == []
    assert bytes_of(found) == bytes_of(expected)
    assert verify(found)["problems"] == []


@pytest.mark.chaos
@pytest.mark.parametrize("delay", [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 8.0])
def test_append_that_is_killed_at_any_moment_can_be_run_again(
    one: Path, tmp_path: Path, delay: float
) -> None:
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    running = subprocess.Popen([sys.executable, "-m", "pipelines", *command(one, dataset)])
    time.sleep(delay)
    running.kill()
    running.wait(PATIENCE_SEC)
    assert verify(dataset)["problems"] == []
    build(appended(one, dataset))
    assert_equal_datasets(dataset, one / "both")


def children(pid: int) -> list[int]:
    """Return all processes below one."""
    own = [*children_of(pid)]
    return [*own, *(c for o in own for c in children(o))]


@pytest.mark.slow
def test_worker_process_that_is_killed_ends_the_build_and_a_rerun_gives_the_same(
    tmp_path: Path,
) -> None:
    write_log(tmp_path / "log", num_rows=8_000)
    job, dataset = write_job(tmp_path / "job"), tmp_path / "dataset"
    limit = "  gate: {max_reject_fraction: 1.0}\n  block_samples"  # half of the ids are too large
    job.write_text(job.read_text().replace("  block_samples", limit))
    arguments = ["build", str(job), "--input", str(tmp_path / "log"), "--output", str(dataset)]
    running = subprocess.Popen(
        [sys.executable, "-m", "pipelines", *arguments, *PROCESSES],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE_SEC
    while not list(dataset.glob("segments/*/shuffle/map-*.rows")):
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(children(running.pid)[-1], signal.SIGKILL)
    _, err = running.communicate(timeout=PATIENCE_SEC)
    assert running.returncode == 1
    assert "error: a worker process was killed, perhaps for lack of memory; run the" in err
    assert find_root(dataset) is None
    assert unnamed_places(dataset) == []
    build(request(job, tmp_path / "log", dataset))
    build(request(job, tmp_path / "log", tmp_path / "clean"))
    assert bytes_of(dataset) == bytes_of(tmp_path / "clean")


@pytest.mark.slow
@pytest.mark.parametrize(
    "limit",
    [pytest.param(3_000), *(pytest.param(n, marks=pytest.mark.chaos) for n in (900, 6_000))],
)
def test_append_on_a_full_disk_ends_in_one_line_and_can_be_run_again(
    one: Path, tmp_path: Path, limit: int
) -> None:
    dataset = copy_of(one / "dataset", tmp_path / "dataset")
    before = bytes_of(dataset)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED.format(limit=limit), *command(one, dataset)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SEC,
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "File too large" in done.stderr
    assert bytes_of(dataset) == before
    assert verify(dataset)["problems"] == []
    build(appended(one, dataset))
    assert_equal_datasets(dataset, one / "both")


@pytest.mark.slow
def test_parts_that_are_written_twice_beside_half_written_files_change_no_byte(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(root: Location, file_index: int, *rest: object) -> object:
        for name in ("samples", "groups/user", LOOKUPS + "/items"):  # a killed attempt's
            folder = Path(root / name)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f".{file_index:05d}.parquet.0.partial").write_bytes(b"half")
        part.build_part(root, file_index, *rest)  # type: ignore[arg-type]
        return part.build_part(root, file_index, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(executor, "build_part", twice)
    dataset = tmp_path / "dataset"
    build(request(one / "job" / "job.yaml", one / "log", dataset))
    assert bytes_of(dataset) == bytes_of(one / "dataset")


def test_two_who_write_one_file_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    file = Location.parse(target)
    with file.new_file() as first, file.new_file() as second:
        first.write_text("one")
        second.write_text("two")
    assert target.read_text() == "one"
    assert list(tmp_path.iterdir()) == [target]


def test_reader_of_the_root_before_finds_its_job(one: Path, tmp_path: Path) -> None:
    dataset = one / "both"
    assert (dataset / JOB).read_bytes() == (one / "job-1" / "job.yaml").read_bytes()
    assert open_dataset(dataset).job.schedule.priority == 3
    before = read_dataset(one / "dataset")
    opened = open_root(Location.parse(dataset), before)
    assert opened.job.schedule.priority == 0
    assert opened.open_index(before.indexes[0]).parts


def test_part_with_more_blocks_than_ids_is_refused_by_name() -> None:
    check_num_blocks(1 << 20, 16)
    with pytest.raises(
        SchemaError,
        match=r"^part must have at most 1048576 blocks, got 1048577 of 16 samples; raise ",
    ):
        check_num_blocks((1 << 20) + 1, 16)
