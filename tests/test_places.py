"""Where datasets and runs may lie."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from presage.pipelines import cli as pipelines
from presage.scheduler import __main__ as scheduler
from presage.schemas import paths
from presage.schemas.storage.location import Location
from presage.trainer import __main__ as trainer
from tests.scheduler.small_job import write_job
from tests.shared import Main

LOCKING: tuple[tuple[Main, str], ...] = (
    (trainer.main, "train JOB --dataset dataset --output PLACE"),
    (trainer.main, "erase PLACE --ids ids --table users"),
    (scheduler.main, "run JOB --output PLACE --dry-run"),
)
"""Commands that write to a folder under a lock, and end at once as something is missing."""
LOCAL: tuple[tuple[Main, str], ...] = (
    (trainer.main, "store --directory PLACE --token-file token"),
    (scheduler.main, "run JOB --output PLACE"),
    (scheduler.main, "status PLACE"),
)
"""Commands that take no URL."""
ANYWHERE: tuple[tuple[Main, str], ...] = (
    (pipelines.main, "append JOB --input log --dataset PLACE"),
    (pipelines.main, "seal PLACE"),
    (pipelines.main, "vacuum PLACE"),
    (pipelines.main, "erase PLACE --rewrite"),
    (pipelines.main, "expand PLACE --output samples"),
    (pipelines.main, "report PLACE --html report.html"),
    (pipelines.main, "verify PLACE"),
    (pipelines.main, "oracle PLACE"),
    (pipelines.main, "oracle PLACE --reindex"),
    (trainer.main, "evaluate JOB --dataset PLACE --run run"),
    (trainer.main, "train JOB --dataset PLACE --output run"),
    (scheduler.main, "plan JOB --dataset PLACE"),
)
"""Commands that take a dataset at a path or a URL."""


@pytest.fixture(autouse=True)
def working_directory(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty working directory that lies on NFS, as far as the mounts tell."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "MOUNTS", tmp_path_factory.mktemp("mounts") / "mountinfo")
    paths.MOUNTS.write_text(f"40 27 0:40 / {tmp_path.resolve()} rw - nfs4 server:/export rw\n")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job that holds something back."""
    path = write_job(tmp_path_factory.mktemp("job"))
    text = path.read_text().replace("data:\n", "data:\n  split: {evaluation_from: 2026-01-02}\n")
    path.write_text(text)
    return str(path)


def run_line(main: Main, line: str, job: str, place: str) -> int:
    return main([{"JOB": job, "PLACE": place}.get(word, word) for word in line.split()])


@pytest.mark.parametrize(("main", "line"), LOCKING, ids=[line for _, line in LOCKING])
def test_every_command_that_locks_warns_of_a_network_filesystem(
    main: Main, line: str, job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_line(main, line, job, "data")
    first = capsys.readouterr().err.splitlines()[0].replace(str(tmp_path / "data"), "data")
    assert first == (
        "warning: output is on a network filesystem, where locks may not hold between hosts: "
        f"'data' on nfs4 (mounted at {tmp_path.resolve()}); let no other process write there"
    )


@pytest.mark.parametrize(("main", "line"), LOCAL, ids=[line for _, line in LOCAL])
def test_url_is_refused_in_one_line_and_nothing_is_written(
    main: Main, line: str, job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_line(main, line, job, "s3://bucket/x")
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"must be (local|a local folder), got 's3://bucket/x'; (mount|give)", last)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["data", "memory://nothing/data"])
@pytest.mark.parametrize(("main", "line"), ANYWHERE, ids=[line for _, line in ANYWHERE])
def test_dataset_may_lie_anywhere_and_one_that_is_missing_is_named(
    main: Main, line: str, place: str, job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_line(main, line, job, place) == 1
    where = Location.parse(place)
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: there is no dataset: no build was committed in {where}; build it, or correct the "
        "path"
    )
    assert where.entries() == []
    assert list(tmp_path.iterdir()) == []
