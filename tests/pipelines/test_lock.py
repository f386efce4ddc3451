"""Builds that meet in one directory, and builds that were killed there."""

from pathlib import Path

import pytest

from pipelines import build as module
from pipelines.build import build
from pipelines.commands import main
from pipelines.lock import locked
from pipelines.verify import verify
from schemas.dataset import open_dataset
from schemas.errors import SchemaError
from schemas.layout import SEGMENTS
from tests.pipelines.logs import built, bytes_of, request, write_job, write_log


def left_behind(dataset: Path) -> list[Path]:
    """Return workplaces as a killed build leaves them."""
    places = [dataset / SEGMENTS / ".00000-dead.1", dataset / ".index.1"]
    for place in places:
        place.mkdir(parents=True)
        (place / "00000.partial").write_bytes(b"half")
    return places


def test_build_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    left_behind(tmp_path / "a" / "dataset")
    assert bytes_of(built(tmp_path / "a")) == bytes_of(built(tmp_path / "b"))


def test_build_leaves_the_workplaces_of_others_alone(tmp_path: Path) -> None:
    segment, index = left_behind(tmp_path / "dataset")
    with locked(segment), locked(index):
        built(tmp_path)
    assert segment.is_dir()
    assert index.is_dir()


def test_build_of_another_job_that_was_faster_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, dataset = write_job(tmp_path / "job"), tmp_path / "dataset"
    write_log(tmp_path / "first", seed=1)
    write_log(tmp_path / "second", seed=2)
    finish = module.finish_segment

    def finish_later(*arguments: object) -> object:
        monkeypatch.setattr(module, "finish_segment", finish)
        build(request(job, tmp_path / "second", dataset))
        return finish(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "finish_segment", finish_later)
    slow = request(job, tmp_path / "first", dataset)
    with pytest.raises(SchemaError, match="output must be empty or hold the same segment, got"):
        build(slow)
    build(request(job, tmp_path / "second", dataset))
    assert verify(dataset)["problems"] == []


def test_build_of_a_finished_dataset_keeps_its_other_indexes(tmp_path: Path) -> None:
    dataset = built(tmp_path)
    assert main(["oracle", str(dataset), "--reindex", "--epochs", "2", "--json"]) == 0
    before = bytes_of(dataset)
    assert len(open_dataset(dataset).indexes) == 2
    build(request(tmp_path / "job" / "job.yaml", tmp_path / "log", dataset))
    assert bytes_of(dataset) == before
