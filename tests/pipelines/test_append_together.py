"""Segments appended at once, and by attempts that die."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.build import build
from pipelines.table import commit as module
from pipelines.table.commit import write_root
from pipelines.table.verify import verify
from schemas.dataset import open_dataset
from schemas.layout import SEGMENTS
from tests.pipelines.appending import addition, with_logs
from tests.pipelines.logs import (
    copy_of,
)


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
    assert [s.manifest.position for s in opened.segments] == [0, 1, 2]
    assert opened.manifest.indexes[0].parts.keys() == {s.id for s in opened.segments}
    assert verify(dataset)["problems"] == []
    again = copy_of(one / "dataset", tmp_path / "again")
    for position in (1, 2):
        build(addition(job, one / f"log-{position}", again, position))
    assert open_dataset(again).manifest == opened.manifest


def test_append_that_meets_a_faster_one_takes_the_place_after_it(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, job = copy_of(one / "dataset", tmp_path / "dataset"), one / "job" / "job.yaml"
    replace_root = module.try_commit

    def late(*arguments: object) -> bool:
        monkeypatch.setattr(module, "try_commit", replace_root)
        build(addition(job, one / "log-2", dataset, attempt="faster"))
        return replace_root(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "try_commit", late)
    build(addition(job, one / "log-1", dataset))
    listings = [s.manifest.listing for s in open_dataset(dataset).segments]
    assert [sum(f.num_bytes for f in listing) for listing in listings[1:]] == [
        sum(f.stat().st_size for f in (one / log).iterdir()) for log in ("log-2", "log-1")
    ]
    assert verify(dataset)["problems"] == []
    assert not list(dataset.glob(".*"))
    assert not list((dataset / SEGMENTS).glob(".*"))


@pytest.mark.slow
def test_segment_that_was_renamed_but_not_named_by_the_root_is_taken_over(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, job = copy_of(one / "dataset", tmp_path / "dataset"), one / "job" / "job.yaml"
    before = open_dataset(dataset).manifest

    def killed(root: Path, *rest: object, **more: object) -> object:
        if root == dataset:  # the segment has its name by now, the root is still the old one
            raise KeyboardInterrupt
        return write_root(root, *rest, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_root", killed)
        with pytest.raises(KeyboardInterrupt):
            build(addition(job, one / "log-1", dataset))
    assert open_dataset(dataset).manifest == before
    said: list[str] = []
    build(replace(addition(job, one / "log-1", dataset), progress=said.append))
    assert verify(dataset)["problems"] == []
    assert "segment finished by an attempt that died: taken over" in said
    other = copy_of(one / "dataset", tmp_path / "other")
    build(addition(job, one / "log-1", other))
    assert open_dataset(other).manifest == open_dataset(dataset).manifest
