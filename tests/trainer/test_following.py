"""A run that follows its dataset has the bits of one that began when all was built."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from schemas.layout import BLOCKS
from schemas.manifest import read_dataset
from schemas.run_log import METRICS, read_metrics
from tests.trainer.growing import (
    GROWING,
    ONCE,
    Pipeline,
    StoppedError,
    follow_job,
    job,
    make_versions,
    stopping_at,
    versions,
    whole,
)
from tests.trainer.make_dataset import write_job
from tests.trainer.runs import assert_equal, run_job
from trainer.diff import compare_runs
from trainer.run import verify_run

__all__ = ["job", "versions", "whole"]

NUM_STEPS = 22
COMMITS = {
    "when it is waited for": (),
    "in the middle": (3, 13, 14),
    "in the last steps": (10, 11, 15, 18, 19),
    "all at once": (2, 2, 2, 2),
    "each after a step": (4, 5, 6, 7),
}


CACHES = {
    "a log": {"files": "log"},
    "files": {"files": "mmap"},
    "a log and Belady": {"files": "log", "policy": "belady", "rows": "520"},
    "files and Belady": {"files": "mmap", "policy": "belady", "rows": "520"},
    "a log, saved often": {"files": "log", "every_steps": "2"},
    "files, saved often": {"files": "mmap", "every_steps": "3"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "at"),
    [
        (cache, at)
        for n, cache in enumerate(CACHES)
        for m, at in enumerate(COMMITS)
        if (m - n) % len(COMMITS) in (0, 2)
    ],
)
def test_cached_run_that_follows_has_the_bits_of_one_on_the_finished_dataset(
    cache: str, at: str, versions: list[Path], whole: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", **ONCE, **CACHES[cache])
    pipeline = Pipeline(versions, tmp_path / "dataset", COMMITS[at])
    summary = follow_job(job, tmp_path / "dataset", tmp_path / "run", pipeline, embedding="cached")
    assert summary.num_steps == NUM_STEPS
    assert_equal(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("embedding", ["plain", "lru", "uncached"])
def test_run_without_a_plan_that_follows_has_the_bits_of_one_on_the_finished_dataset(
    embedding: str, versions: list[Path], whole: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", **ONCE, rows="600")
    pipeline = Pipeline(versions, tmp_path / "dataset", (3, 12))
    follow_job(job, tmp_path / "dataset", tmp_path / "run", pipeline, embedding=embedding)
    assert len(pipeline.waits) == 2
    assert_equal(tmp_path / "run", whole)


@pytest.mark.slow
def test_run_over_store_processes_that_follows_has_the_bits_of_one_on_the_finished_dataset(
    job: Path, versions: list[Path], whole: Path, tmp_path: Path
) -> None:
    pipeline = Pipeline(versions, tmp_path / "dataset", (10, 18))
    options: dict[str, Any] = {"embedding": "cached", "stores": 2}
    follow_job(job, tmp_path / "dataset", tmp_path / "run", pipeline, **options)
    assert_equal(tmp_path / "run", whole)


@pytest.mark.slow
def test_order_of_blocks_as_stored_is_followed_too(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", shuffle="none", **ONCE)
    versions = make_versions(tmp_path / "versions", job)
    pipeline = Pipeline(versions, tmp_path / "dataset", (10, 15))
    run_job(job, versions[-1], tmp_path / "whole")
    follow_job(job, tmp_path / "dataset", tmp_path / "run", pipeline, embedding="cached")
    assert_equal(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("files", ["log", "mmap"])
def test_second_epoch_begins_after_the_last_segment(files: str, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", epochs="2", files=files, every_steps="4")
    versions = make_versions(tmp_path / "versions", job)
    pipeline = Pipeline(versions, tmp_path / "dataset", (10, 15))
    run_job(job, versions[-1], tmp_path / "whole")
    follow_job(job, tmp_path / "dataset", tmp_path / "run", pipeline, embedding="cached")
    assert_equal(tmp_path / "run", tmp_path / "whole")
    assert len(read_metrics(tmp_path / "run" / METRICS)) == 2 * NUM_STEPS


@pytest.mark.slow
def test_run_of_some_steps_waits_only_for_their_segments(
    job: Path, versions: list[Path], tmp_path: Path
) -> None:
    pipeline = Pipeline(versions, tmp_path / "dataset")
    options: dict[str, Any] = {"embedding": "cached", "steps": 14}
    summary = follow_job(job, tmp_path / "dataset", tmp_path / "run", pipeline, **options)
    assert summary.num_steps == 14
    assert len(pipeline.waits) == 1
    run_job(job, versions[-1], tmp_path / "some", embedding="cached", steps=14)
    assert compare_runs(tmp_path / "run", tmp_path / "some").difference is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "files"),
    [(2, "log"), (11, "mmap"), (12, "log"), (15, "mmap"), (18, "log"), (19, "mmap")],
)
def test_run_that_died_goes_on_with_a_dataset_that_has_grown_meanwhile(
    stop: int, files: str, versions: list[Path], whole: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", **ONCE, every_steps="1", files=files)
    pipeline, dataset = Pipeline(versions, tmp_path / "dataset"), tmp_path / "dataset"
    on_step = stopping_at(stop, pipeline.on_step)
    options: dict[str, Any] = {"embedding": "cached"}
    with pytest.raises(StoppedError):
        follow_job(job, dataset, tmp_path / "run", pipeline, on_step=on_step, **options)
    pipeline.more()
    follow_job(job, dataset, tmp_path / "run", pipeline, resume=True, **options)
    assert_equal(tmp_path / "run", whole)


@pytest.mark.slow
def test_blocks_of_a_run_grow_with_the_segments_and_verify_tells_what_is_trained_of_them(
    job: Path, versions: list[Path], tmp_path: Path
) -> None:
    found: list[tuple[int, list[str]]] = []
    run = tmp_path / "run"

    def say(line: str) -> None:
        known = pq.read_table(run / BLOCKS)["segment"].to_pylist()
        found.append((len(set(known)), list(verify_run(run).problems)))
        Pipeline.say(pipeline, line)

    pipeline = Pipeline(versions, tmp_path / "dataset")
    pipeline.say = say  # type: ignore[method-assign]
    follow_job(job, tmp_path / "dataset", run, pipeline)
    assert found == [(n, []) for n in range(1, len(GROWING))]
    assert verify_run(run).num_steps == NUM_STEPS
    assert len(set(pq.read_table(run / BLOCKS)["segment"].to_pylist())) == len(GROWING)


def test_waiting_is_a_phase_of_the_step_that_follows_and_no_time_of_it(
    job: Path, versions: list[Path], tmp_path: Path
) -> None:
    pipeline = Pipeline(versions, tmp_path / "dataset")
    follow_job(job, tmp_path / "dataset", tmp_path / "run", pipeline)
    steps = pipeline.steps
    assert [m.step for m in steps if m.phases["wait"] >= 1000] == [12, 16, 19, 20]
    assert max(m.num_samples / m.samples_per_sec for m in steps) < 100


@pytest.mark.slow
def test_dataset_that_is_not_there_yet_is_waited_for(
    job: Path, versions: list[Path], whole: Path, tmp_path: Path
) -> None:
    dataset = tmp_path / "later" / "dataset"
    pipeline = Pipeline([], dataset)
    pipeline.left = iter(versions)
    follow_job(job, dataset, tmp_path / "run", pipeline, embedding="cached")
    ids = [reference.id for reference in read_dataset(versions[-1]).segments]
    assert pipeline.waits[0] == f"waiting at step 0: {dataset} does not exist yet"
    assert pipeline.waits[1] == (
        f"waiting at step 12: 1 segments are committed, the last is {ids[0]}, and the dataset is "
        f"not sealed; append segments, or run python -m pipelines seal {dataset}"
    )
    assert len(pipeline.waits) == len(GROWING)
    assert_equal(tmp_path / "run", whole)
