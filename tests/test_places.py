"""Where commands may write: every one of every package refuses unsafe places before it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipelines import cli as pipelines
from scheduler import __main__ as scheduler
from schemas import paths
from tests.scheduler.made import write_job
from trainer import __main__ as trainer

Main = Callable[[Sequence[str]], int]
WRITING: tuple[tuple[Main, str], ...] = (
    (pipelines.main, "build JOB --input log --output PLACE"),
    (pipelines.main, "append JOB --input log --dataset PLACE"),
    (pipelines.main, "seal PLACE"),
    (pipelines.main, "vacuum PLACE"),
    (pipelines.main, "rewrite parquet --output PLACE"),
    (pipelines.main, "erase PLACE --rewrite"),
    (pipelines.main, "score model --dataset dataset --output PLACE"),
    (pipelines.main, "oracle PLACE --reindex"),
    (trainer.main, "train JOB --dataset dataset --output PLACE"),
    (trainer.main, "erase PLACE --ids ids --table users"),
    (trainer.main, "store --directory PLACE --token-file token"),
    (scheduler.main, "run JOB --output PLACE"),
    (scheduler.main, "run JOB --output PLACE --dry-run"),
    (scheduler.main, "retrain JOB --date 2026-01-01 --input log --output PLACE"),
)
ONLY_PATHS: tuple[tuple[Main, str], ...] = (
    (pipelines.main, "generate JOB --output PLACE"),
    (pipelines.main, "expand dataset --output PLACE"),
    (pipelines.main, "report dataset --html PLACE"),
    (pipelines.main, "verify PLACE"),
    (pipelines.main, "oracle PLACE"),
    (trainer.main, "evaluate JOB --dataset PLACE --run run"),
    (trainer.main, "train JOB --dataset PLACE --output run"),
    (scheduler.main, "plan JOB --dataset PLACE"),
    (scheduler.main, "status PLACE"),
)
RUNS = ("train JOB --dataset dataset --output PLACE", "erase PLACE --ids ids --table users")
"""Commands that write a run, at a path or a URL."""
REFUSING = [*((main, line) for main, line in WRITING if line not in RUNS), *ONLY_PATHS]


@pytest.fixture(autouse=True)
def elsewhere(
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


def told(main: Main, line: str, job: str, place: str) -> int:
    return main([{"JOB": job, "PLACE": place}.get(word, word) for word in line.split()])


@pytest.mark.parametrize(("main", "line"), WRITING, ids=[line for _, line in WRITING])
def test_network_filesystem_is_refused_by_every_command_that_writes(
    main: Main, line: str, job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(main, line, job, "data") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert (
        f"got 'data' on nfs4 (mounted at {tmp_path.resolve()}); use a local disk"
        in error.replace(str(tmp_path / "data"), "data")
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("main", "line"), REFUSING, ids=[line for _, line in REFUSING])
def test_url_is_refused_in_one_line_and_nothing_is_written(
    main: Main, line: str, job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        told(main, line, job, "s3://bucket/x")
    last = capsys.readouterr().err.splitlines()[-1]
    assert "path must be local, got 's3://bucket/x'; mount" in last
    assert list(tmp_path.iterdir()) == []
