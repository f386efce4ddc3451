"""Segments appended at once, and by attempts that die."""

import json
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from pipelines.build import build
from pipelines.context import BuildRequest
from pipelines.table import commit as module
from pipelines.table.vacuum import vacuum
from pipelines.table.verify import verify
from schemas.dataset import open_dataset
from schemas.storage import Location
from tests.pipelines.appending import addition, with_logs
from tests.pipelines.logs import bytes_of, copy_of, unnamed_places


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
    commit_root, outcomes = module.commit_root, list[bool]()

    def late(*arguments: object) -> object:
        if not outcomes:
            monkeypatch.setattr(module, "commit_root", commit_root)
            build(addition(job, one / "log-2", dataset, attempt="faster"))
            monkeypatch.setattr(module, "commit_root", late)
        committed = commit_root(*arguments)  # type: ignore[arg-type]
        outcomes.append(committed is not None)
        return committed

    monkeypatch.setattr(module, "commit_root", late)
    build(addition(job, one / "log-1", dataset))
    listings = [s.manifest.listing for s in open_dataset(dataset).segments]
    assert [sum(f.num_bytes for f in listing) for listing in listings[1:]] == [
        sum(f.stat().st_size for f in (one / log).iterdir()) for log in ("log-2", "log-1")
    ]
    assert verify(dataset)["problems"] == []
    assert outcomes == [False, True]
    assert unnamed_places(dataset) == []


def interrupted(monkeypatch: pytest.MonkeyPatch, function: str, request: BuildRequest) -> None:
    """Run a build that is interrupted when it calls a function of `commit`."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, function, interrupt)
        with pytest.raises(KeyboardInterrupt):
            build(request)


@pytest.mark.slow
def test_segment_that_an_interrupted_build_has_finished_is_taken_over(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, job = copy_of(one / "dataset", tmp_path / "dataset"), one / "job" / "job.yaml"
    before = open_dataset(dataset).manifest
    interrupted(monkeypatch, "claim", addition(job, one / "log-1", dataset, attempt="first"))
    assert open_dataset(dataset).manifest == before
    finished = [place for place in unnamed_places(dataset) if place.startswith("segments/")]
    said: list[str] = []
    build(replace(addition(job, one / "log-1", dataset), progress=said.append))
    assert verify(dataset)["problems"] == []
    assert "segment finished by an attempt that died: taken over" in said
    assert [f"segments/{open_dataset(dataset).segments[1].directory.name}"] == finished
    other = copy_of(one / "dataset", tmp_path / "other")
    build(addition(job, one / "log-1", other))
    assert bytes_of(other) == bytes_of(dataset)


@pytest.mark.slow
def test_segment_that_an_interrupted_build_may_have_committed_is_built_again(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, job = copy_of(one / "dataset", tmp_path / "dataset"), one / "job" / "job.yaml"
    first = addition(job, one / "log-1", dataset, attempt="first")
    interrupted(monkeypatch, "commit_root", first)
    said: list[str] = []
    build(replace(addition(job, one / "log-1", dataset), progress=said.append))
    assert not [line for line in said if "taken over" in line]
    assert verify(dataset)["problems"] == []
    other = copy_of(one / "dataset", tmp_path / "other")
    build(addition(job, one / "log-1", other))
    assert bytes_of(other) == bytes_of(dataset)
    assert len(unnamed_places(dataset)) == 2  # a segment and its part
    vacuum(Location.parse(dataset), timedelta())
    assert unnamed_places(dataset) == []
    assert verify(dataset)["problems"] == []


@pytest.mark.slow
def test_finished_segment_is_taken_over_by_one_process_only(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, job = copy_of(one / "dataset", tmp_path / "dataset"), one / "job" / "job.yaml"
    interrupted(monkeypatch, "claim", addition(job, one / "log-1", dataset, attempt="first"))
    both = [process(job, one / "log-1", dataset) for _ in range(2)]
    outputs = [running.communicate(timeout=240) for running in both]
    assert [running.returncode for running in both] == [0, 0], outputs
    results = [json.loads(out) for out, _ in outputs]
    assert results[0]["segment"] == results[1]["segment"]
    assert sum("taken over" in err for _, err in outputs) == 1
    assert len(open_dataset(dataset).segments) == 2
    assert verify(dataset)["problems"] == []
    assert not [p for p in unnamed_places(dataset) if p.startswith("segments/")]
