"""The last step of a pipeline that writes a dataset, when the system fails it once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner

from pipelines.beam import build as committing
from pipelines.beam.io import WriteDataset
from pipelines.table.verify import verify
from schemas.dataset import open_dataset
from schemas.errors import SchemaError
from schemas.layout import MANIFEST
from tests.pipelines.logs import bytes_of, raw_rows, samples_of, write_job

ROWS = raw_rows(300, seed=0)
Commit = Callable[[], str]


@pytest.fixture(scope="module")
def uncommitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Commit]:
    """A dataset's folder with the parts that a pipeline has written, and the commit of them."""
    folder = tmp_path_factory.mktemp("uncommitted")
    waiting: list[Any] = []

    def wait(*arguments: Any) -> str:
        waiting.append(arguments)
        return "later"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(committing, "commit", wait)
        with beam.Pipeline(runner=FnApiRunner()) as pipeline:
            job = write_job(folder / "job")
            _ = pipeline | beam.Create([ROWS]) | WriteDataset(job, folder / "dataset", "day-1", 3)
    return folder / "dataset", lambda: committing.commit(*waiting[0])


class Renames:
    """Counts renames, and lets one of them fail."""

    def __init__(self, failing: int) -> None:
        self.count, self.failing, self.rename = 0, failing, os.rename

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self.count += 1
        if self.count == self.failing + 1:
            raise OSError(5, "Input/output error", str(arguments[0]))
        self.rename(*arguments, **options)


@pytest.mark.slow
def test_rename_that_fails_once_anywhere_loses_nothing_and_the_retry_completes(
    uncommitted: tuple[Path, Commit], tmp_path: Path
) -> None:
    dataset, commit = uncommitted
    shutil.copytree(dataset, tmp_path / "before")
    wanted: dict[str, bytes] = {}
    failing = -1  # first none does
    while True:
        shutil.rmtree(dataset)
        shutil.copytree(tmp_path / "before", dataset)
        renames = Renames(failing)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "rename", renames)
            try:
                commit()
            except OSError:
                pass
            else:
                if failing >= 0:
                    break  # there was no rename of this number
        commit()
        wanted = wanted or bytes_of(dataset)
        assert bytes_of(dataset) == wanted, f"rename {failing} failed"
        failing += 1
    assert failing > 2
    assert open_dataset(dataset).segments[0].manifest.num_samples == len(samples_of(ROWS))
    assert verify(dataset)["problems"] == []


def test_commit_whose_parts_are_gone_is_refused_instead_of_publishing_what_is_left(
    uncommitted: tuple[Path, Commit],
) -> None:
    dataset, commit = uncommitted
    shutil.rmtree(dataset)
    (dataset / "segments").mkdir(parents=True)
    with pytest.raises(SchemaError, match="parts of the segment are missing"):
        commit()
    assert not (dataset / MANIFEST).exists()
