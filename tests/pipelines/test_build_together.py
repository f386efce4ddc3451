"""Builds that meet in one directory, or meet what should not be there."""

from pathlib import Path

import pytest

from presage.pipelines import build as module
from presage.pipelines.build import build
from presage.pipelines.cli import main
from presage.pipelines.sources.raw_rows import folder_of
from presage.pipelines.table.verify import verify
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location
from tests.pipelines.logs import (
    IN_PROCESS,
    built,
    bytes_of,
    request,
    unnamed_places,
    write_job,
    write_log,
)
from tests.shared import refusal_of


@pytest.mark.slow
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
    with pytest.raises(SchemaError, match="output has other segments:"):
        build(slow)
    assert unnamed_places(dataset) == []
    build(request(job, tmp_path / "second", dataset))
    assert verify(dataset)["problems"] == []


@pytest.mark.slow
def test_build_of_a_finished_dataset_keeps_its_other_indexes(tmp_path: Path) -> None:
    dataset = built(tmp_path)
    assert main(["oracle", str(dataset), "--reindex", "--epochs", "2", IN_PROCESS]) == 0
    before = bytes_of(dataset)
    assert len(open_dataset(dataset).complete_indexes()) == 2
    build(request(tmp_path / "job" / "job.yaml", tmp_path / "log", dataset))
    assert bytes_of(dataset) == before


def test_build_into_a_file_is_one_line(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    (tmp_path / "dataset").write_text("taken")
    arguments = ["--input", str(tmp_path / "log"), "--output", str(tmp_path / "dataset")]
    assert refusal_of(main, ["build", str(write_job(tmp_path / "job")), *arguments]) == (
        f"dataset must be a directory, got a file in {tmp_path / 'dataset'}; choose another"
    )


def test_build_into_its_own_input_is_refused(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    job = write_job(tmp_path / "job")
    url = f"memory://{tmp_path.name}/log"
    for log in (str(tmp_path / "log"), url):
        for dataset in (log, f"{log}/dataset"):
            into = request(job, log, Location.parse(dataset))
            with pytest.raises(SchemaError, match=r"^output must lie outside the input, got "):
                build(into)
    assert not folder_of(url).contains(Location.parse(f"{url}-2/dataset"))
    assert folder_of("/").contains(Location.parse("/dataset"))


@pytest.mark.slow
def test_build_leaves_out_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "log" / ".tmp").mkdir(parents=True)
    for name in (".log.parquet", ".tmp/log.parquet"):
        (tmp_path / "log" / name).write_bytes(b"half")
    manifest = open_dataset(built(tmp_path)).segments[0].manifest
    assert [f.path for f in manifest.listing] == [f"log-{i}.parquet" for i in range(3)]
    assert manifest.num_rejects == 0
