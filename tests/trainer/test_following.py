"""A run that follows its dataset has the bits of one that began when all was built."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.errors import PlanError, SchemaError
from schemas.events import METRICS, StepMetric, read_metrics
from schemas.layout import MANIFEST
from schemas.manifest import read_dataset, write_manifest
from tests.trainer.growing import GROWING, Pipeline, commit, follow_job, make_versions
from tests.trainer.make_dataset import write_job
from tests.trainer.runs import run_job
from trainer.compare import compare_runs
from trainer.ledger import verify_run
from trainer.run import IDENTITY

NUM_STEPS = 22
ONCE = {"epochs": "1"}
COMMITS = {
    "when it is waited for": (),
    "in the middle": (3, 13, 14),
    "in the last steps": (10, 11, 15, 18, 19),
    "all at once": (2, 2, 2, 2),
    "each after a step": (4, 5, 6, 7),
}


@pytest.fixture(scope="module", params=["blocks", "none"])
def shuffle(request: pytest.FixtureRequest) -> str:
    """Order of blocks."""
    return request.param


@pytest.fixture(scope="module")
def versions(shuffle: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The dataset after each segment."""
    folder = tmp_path_factory.mktemp("versions")
    return make_versions(folder, write_job(folder / "job", shuffle=shuffle, **ONCE))


@pytest.fixture(scope="module")
def job(versions: list[Path]) -> Path:
    """The job of the versions."""
    return versions[0].parent / "job" / "job.yaml"


@pytest.fixture(scope="module")
def whole(job: Path, versions: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain run on the finished dataset."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    run_job(job, versions[-1], run)
    return run


def assert_equal(run: Path, other: Path) -> None:
    """Assert that two runs have the same bits and that one is whole."""
    assert compare_runs(run, other).difference is None
    assert verify_run(run).problems == ()


CACHES = {
    "a log": {"files": "log"},
    "files": {"files": "mmap"},
    "a log and Belady": {"files": "log", "policy": "belady", "rows": "520"},
    "files and Belady": {"files": "mmap", "policy": "belady", "rows": "520"},
    "a log, saved often": {"files": "log", "every_steps": "2"},
    "files, saved often": {"files": "mmap", "every_steps": "3"},
}


@pytest.mark.parametrize("at", COMMITS.values(), ids=COMMITS.keys())
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES.keys())
def test_cached_run_that_follows_has_the_bits_of_one_on_the_finished_dataset(
    cache: dict[str, str],
    at: tuple[int, ...],
    shuffle: str,
    versions: list[Path],
    whole: Path,
    tmp_path: Path,
) -> None:
    job = write_job(tmp_path / "job", shuffle=shuffle, **ONCE, **cache)
    pipeline = Pipeline(versions, tmp_path / "dataset", at)
    summary = follow_job(job, tmp_path / "dataset", tmp_path / "run", pipeline, embedding="cached")
    assert summary.num_steps == NUM_STEPS
    assert_equal(tmp_path / "run", whole)
