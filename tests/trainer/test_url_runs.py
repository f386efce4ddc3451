"""A run at a URL: trained in a work folder, uploaded beside training, and read from anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.run_manifest import ALL, OBJECTS, fetch_run, read_newest_manifest
from schemas.storage import MANIFESTS, Location
from tests.object_store import new_url
from tests.trainer.make_dataset import write_job
from trainer.__main__ import main


@pytest.fixture
def url() -> str:
    """A new URL in this process's memory."""
    return new_url().replace("s3://", "memory://")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job that saves every four steps."""
    return write_job(tmp_path / "job", every_steps="4", epochs="1")


def train(job: Path, dataset: Path, output: object, work: Path, *more: str) -> int:
    words = ["train", job, "--dataset", dataset, "--output", output, "--work", work, *more]
    return main([str(word) for word in words])


def check_objects(url: str) -> None:
    """Check that the objects of a run are those that its newest manifest names."""
    output = Location.parse(url)
    newest = read_newest_manifest(output)
    assert newest is not None
    assert {f"{OBJECTS}/{e.path}" for e in (output / OBJECTS).entries()} == newest.objects
    numbers = [entry.path for entry in (output / MANIFESTS).entries()]
    assert numbers == [f"{n:08d}.json" for n in range(newest.number + 1)]


def test_run_at_a_url_equals_a_run_in_a_folder(
    job: Path, dataset: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(job, dataset, url, tmp_path / "work") == 0
    assert train(job, dataset, tmp_path / "run", tmp_path / "work") == 0
    assert main(["diff", url, str(tmp_path / "run")]) == 0
    assert main(["verify", url]) == 0
    assert [p for p in (tmp_path / "work").iterdir() if p.is_dir()] == []
    check_objects(url)
    fetch_run(Location.parse(url), tmp_path / "copy", ALL)
    names = {p.relative_to(tmp_path / "run") for p in (tmp_path / "run").rglob("*")}
    others = {p.relative_to(tmp_path / "copy") for p in (tmp_path / "copy").rglob("*")}
    assert names ^ others == {Path("checkpoints.lock")}
    capsys.readouterr()
