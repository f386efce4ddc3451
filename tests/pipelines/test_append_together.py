"""Segments appended at once, and by attempts that are interrupted."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from presage.pipelines.build import build
from presage.pipelines.table import commit as module
from presage.pipelines.table.verify import verify
from presage.schemas.dataset.opened import open_dataset
from tests.pipelines.appending import addition, with_logs
from tests.pipelines.logs import bytes_of, copy_of, unnamed_places, vacuum_later


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with job, three logs and a dataset of the first; not to be changed."""
    return with_logs(tmp_path_factory.mktemp("one"))


def process(job: Path, log: Path, dataset: Path, *more: str) -> subprocess.Popen[str]:
    """Start an append in a process of its own."""
    command = [sys.executable, "-m", "pipelines", "append", str(job), "--json"]
    return subprocess.Popen(
        [*command, "--dataset", str(dataset), "--input", str(log), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_processes_append_at_once_and_none_is_lost(one: Path, tmp_path: Path) -> None:
    dataset, job = copy_of(one / "dataset", tmp_path / "dataset"), one / "job" / "job.yaml"
    both = [process(job, one / f"log-{i}", dataset, "--position", str(i)) for i in (1, 2)]
    for running in both:
        out, err = running.communicate(timeout=240)
        assert running.returncode == 0, err
        assert json.loads(out)["built"]
    opened = open_dataset(dataset)
    assert [s.reference.position for s in opened.segments] == [0, 1, 2]
    (index,) = opened.manifest.indexes
    assert index.parts.keys() == {s.id for s in opened.segments}
    assert unnamed_places(dataset) == []
    assert verify(dataset)["problems"] == []
    again = copy_of(one / "dataset", tmp_path / "again")
    for position in (1, 2):
        build(addition(job, one / f"log-{position}", again, position))
    assert bytes_of(again) == bytes_of(dataset)


def test_append_that_meets_a_faster_one_takes_the_place_after_it(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, job = copy_of(one / "dataset", tmp_path / "dataset"), one / "job" / "job.yaml"
    commit_manifest, outcomes = module.commit_manifest, list[bool]()

    def late(*arguments: object) -> object:
        if not outcomes:
            monkeypatch.setattr(module, "commit_manifest", commit_manifest)
            build(addition(job, one / "log-2", dataset, attempt="fa57fa57fa57"))
            monkeypatch.setattr(module, "commit_manifest", late)
        committed = commit_manifest(*arguments)  # type: ignore[arg-type]
        outcomes.append(committed is not None)
        return committed

    monkeypatch.setattr(module, "commit_manifest", late)
    build(addition(job, one / "log-1", dataset))
    listings = [s.manifest.listing for s in open_dataset(dataset).segments]
    assert [sum(f.num_bytes for f in listing) for listing in listings[1:]] == [
        sum(f.stat().st_size for f in (one / log).iterdir()) for log in ("log-2", "log-1")
    ]
    assert verify(dataset)["problems"] == []
    assert outcomes == [False, True]
    assert unnamed_places(dataset) == []


@pytest.mark.slow
@pytest.mark.parametrize("is_committed", [False, True])
def test_segment_that_an_interrupted_build_may_have_committed_is_left_to_vacuum(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    dataset, job = copy_of(one / "dataset", tmp_path / "dataset"), one / "job" / "job.yaml"
    commit = module.commit_manifest

    def interrupted(*arguments: Any) -> None:
        if is_committed:
            commit(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "commit_manifest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build(addition(job, one / "log-1", dataset, attempt="f125f125f125"))
    assert len(unnamed_places(dataset)) == (0 if is_committed else 2)  # a segment and its part
    assert len(open_dataset(dataset).segments) == 1 + is_committed
    build(addition(job, one / "log-1", dataset))
    other = copy_of(one / "dataset", tmp_path / "other")
    build(addition(job, one / "log-1", other))
    assert bytes_of(other) == bytes_of(dataset)
    vacuum_later(dataset)
    assert unnamed_places(dataset) == []
    assert verify(dataset)["problems"] == []


@pytest.mark.slow
def test_two_processes_that_append_one_log_at_once_end_as_one_segment(
    one: Path, tmp_path: Path
) -> None:
    dataset, job = copy_of(one / "dataset", tmp_path / "dataset"), one / "job" / "job.yaml"
    both = [process(job, one / "log-1", dataset) for _ in range(2)]
    outputs = [running.communicate(timeout=240) for running in both]
    assert [running.returncode for running in both] == [0, 0], outputs
    results = [json.loads(out) for out, _ in outputs]
    assert results[0]["segment"] == results[1]["segment"]
    assert len(open_dataset(dataset).segments) == 2
    assert verify(dataset)["problems"] == []
    assert unnamed_places(dataset) == []


@pytest.mark.slow
def test_two_processes_that_replace_one_day_at_once_end_in_order_or_as_one_refusal(
    one: Path, tmp_path: Path
) -> None:
    dataset, job = copy_of(one / "dataset", tmp_path / "dataset"), one / "job" / "job.yaml"
    day = ("--day", "2026-01-02", "--replace")
    both = [process(job, one / f"log-{i}", dataset, *day) for i in (1, 2)]
    outputs = [running.communicate(timeout=240) for running in both]
    assert all(running.returncode in (0, 1) for running in both), outputs
    assert any(running.returncode == 0 for running in both), outputs
    root = open_dataset(dataset).manifest
    printed = [json.loads(out)["segment"] for out, _ in outputs if out]
    assert [s.id for s in root.segments[1:]] in [[segment] for segment in printed]
    for (_, err), running in zip(outputs, both, strict=True):
        assert running.returncode == 0 or err.splitlines()[-1].startswith("error: "), err
    assert verify(dataset)["problems"] == []
    vacuum_later(dataset)
    assert unnamed_places(dataset) == []
