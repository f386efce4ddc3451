"""A run that follows its dataset has the bits of one on the finished dataset; refusals."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from presage.schemas.dataset.manifest import DatasetManifest, read_dataset
from presage.schemas.errors import PlanError, SchemaError
from presage.schemas.layout import BLOCKS
from presage.schemas.run.records import METRICS, RUN_FILE, StepMetric, read_metrics
from presage.schemas.storage.location import MANIFESTS
from presage.trainer.run.compare import compare_runs
from presage.trainer.run.folder import verify_run
from tests.shared import in_pairs
from tests.trainer.growing import (
    GROWING,
    ONCE,
    Pipeline,
    StoppedError,
    commit,
    follow_job,
    job,
    make_versions,
    stopping_at,
    versions,
    whole,
)
from tests.trainer.make_dataset import change_root, write_job
from tests.trainer.runs import assert_equal, run_job, steps_of

__all__ = ["job", "versions", "whole"]

CACHED: dict[str, Any] = {"embedding": "cached"}
NUM_STEPS = 22
COMMITS = {
    "when the run waits": (),
    "in the middle": (3, 13, 14),
    "in the last steps": (10, 11, 15, 18, 19),
    "all at once": (2, 2, 2, 2),
    "each after a step": (4, 5, 6, 7),
}
STOPS = [(15, "mmap"), (18, "log"), (19, "mmap")]
"""Other steps at which a segment ends, or the next begins."""
CACHES = {
    "a log": {"files": "log"},
    "files": {"files": "mmap"},
    "a log and Belady": {"files": "log", "policy": "belady", "rows": "520"},
    "files and Belady": {"files": "mmap", "policy": "belady", "rows": "520"},
    "a log, saved often": {"files": "log", "every_steps": "2"},
    "files, saved often": {"files": "mmap", "every_steps": "3"},
}


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "at"), in_pairs(CACHES, COMMITS, rest=False))
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
    assert len(pipeline.messages) == 2
    assert_equal(tmp_path / "run", whole)


@pytest.mark.slow
def test_run_over_store_processes_that_follows_has_the_bits_of_one_on_the_finished_dataset(
    job: Path, versions: list[Path], whole: Path, tmp_path: Path
) -> None:
    pipeline = Pipeline(versions, tmp_path / "dataset", (10, 18))
    follow_job(job, tmp_path / "dataset", tmp_path / "run", pipeline, stores=2, **CACHED)
    assert_equal(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shuffle", "files"),
    [("blocks", "log"), pytest.param("none", "mmap", marks=pytest.mark.nightly)],
)
def test_second_epoch_begins_after_the_last_segment(
    shuffle: str, files: str, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", epochs="2", shuffle=shuffle, files=files, every_steps="4")
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
    summary = follow_job(job, tmp_path / "dataset", tmp_path / "run", pipeline, steps=14, **CACHED)
    assert summary.num_steps == 14
    assert len(pipeline.messages) == 1
    run_job(job, versions[-1], tmp_path / "some", embedding="cached", steps=14)
    assert compare_runs(tmp_path / "run", tmp_path / "some").difference is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "files"),
    [
        (2, "log"),
        (11, "mmap"),
        (12, "log"),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in STOPS),
    ],
)
def test_run_that_died_continues_with_a_dataset_that_has_grown_meanwhile(
    stop: int, files: str, versions: list[Path], whole: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", **ONCE, every_steps="1", files=files)
    pipeline, dataset = Pipeline(versions, tmp_path / "dataset"), tmp_path / "dataset"
    on_step = stopping_at(stop, pipeline.on_step)
    with pytest.raises(StoppedError):
        follow_job(job, dataset, tmp_path / "run", pipeline, on_step=on_step, **CACHED)
    pipeline.commit_next()
    follow_job(job, dataset, tmp_path / "run", pipeline, resume=True, **CACHED)
    assert_equal(tmp_path / "run", whole)


@pytest.mark.slow
def test_blocks_of_a_run_grow_with_its_segments_and_are_verified(
    job: Path, versions: list[Path], tmp_path: Path
) -> None:
    at_waits: list[tuple[int, list[str]]] = []
    run = tmp_path / "run"

    def num_segments() -> int:
        return len(set(pq.read_table(run / BLOCKS)["segment"].to_pylist()))

    def on_wait(message: str) -> None:
        at_waits.append((num_segments(), list(verify_run(run).problems)))
        Pipeline.on_wait(pipeline, message)

    pipeline = Pipeline(versions, tmp_path / "dataset")
    pipeline.on_wait = on_wait  # type: ignore[method-assign]
    follow_job(job, tmp_path / "dataset", run, pipeline)
    assert at_waits == [(n, []) for n in range(1, len(GROWING))]
    assert verify_run(run).num_steps == NUM_STEPS
    assert num_segments() == len(GROWING)


@pytest.mark.slow
def test_waiting_is_a_phase_of_the_step_that_follows_and_no_time_of_it(
    job: Path, versions: list[Path], tmp_path: Path
) -> None:
    pipeline = Pipeline(versions, tmp_path / "dataset")
    follow_job(job, tmp_path / "dataset", tmp_path / "run", pipeline)
    steps = pipeline.steps
    assert [m.step for m in steps if m.phases["wait"] >= 1000] == [12, 16, 19, 20]
    assert max(m.num_samples / m.samples_per_sec for m in steps) < 1000


@pytest.mark.slow
def test_run_waits_for_a_dataset_that_does_not_exist_yet(
    job: Path, versions: list[Path], whole: Path, tmp_path: Path
) -> None:
    dataset = tmp_path / "later" / "dataset"
    pipeline = Pipeline([], dataset)
    pipeline.remaining = iter(versions)
    follow_job(job, dataset, tmp_path / "run", pipeline, embedding="cached")
    ids = [reference.id for reference in read_dataset(versions[-1]).segments]
    assert pipeline.messages[0] == f"waiting at step 0: {dataset} does not exist yet"
    assert pipeline.messages[1] == (
        f"waiting at step 12: 1 segments are committed, the last is {ids[0]}, and the dataset is "
        f"not sealed; append segments, or run python -m presage.pipelines seal {dataset}"
    )
    assert len(pipeline.messages) == len(GROWING)
    assert_equal(tmp_path / "run", whole)


def commit_changed(dataset: Path, **changes: object) -> None:
    """Commit the root manifest with other values."""
    change_root(dataset, lambda root: replace(root, **changes))  # type: ignore[arg-type]


def other_segment(root: DatasetManifest) -> dict[str, object]:
    """Return another segment in the place of the first."""
    return {"segments": (replace(root.segments[0], id="00000-other"), *root.segments[1:])}


REPLACED = {
    "another segment": (
        other_segment,
        "segment 0 of the dataset changed while it was followed: from 000000000000-5a11 to "
        "00000-other in {dataset}; restore it, or train a new run on the dataset",
    ),
    "fewer segments": (
        lambda root: {"segments": root.segments[:1]},
        "segment 1 of the dataset changed while it was followed: from 000000000001-5a11 to None "
        "in {dataset}; restore it, or train a new run on the dataset",
    ),
    "another schema": (
        lambda root: {"schema_sha256": "f" * 64},
        "schema_sha256 of the dataset changed while it was followed: from {schema} to ffffffffffff "
        "in {dataset}; train a new run on it",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("change", "message"), REPLACED.values(), ids=REPLACED.keys())
def test_replaced_dataset_is_refused_and_a_restored_one_continued(
    change: Callable[[DatasetManifest], dict[str, object]],
    message: str,
    job: Path,
    versions: list[Path],
    whole: Path,
    tmp_path: Path,
) -> None:
    dataset, run = tmp_path / "dataset", tmp_path / "run"
    pipeline = Pipeline(versions, dataset, (3,))

    def on_step(metric: StepMetric, num_steps: int) -> None:
        pipeline.on_step(metric, num_steps)
        if metric.step == 8:
            commit_changed(dataset, **change(read_dataset(dataset)))

    text = message.format(dataset=dataset, schema=read_dataset(versions[0]).schema_sha256[:12])
    with pytest.raises(SchemaError, match=f"^{re.escape(text)}$"):
        follow_job(job, dataset, run, pipeline, on_step=on_step, **CACHED)
    assert steps_of(run)[-1] >= 9
    with pytest.raises(
        SchemaError,
        match=r"(does not begin with the segments of the run|schema|manifest is missing)",
    ):
        follow_job(job, dataset, run, pipeline, resume=True, **CACHED)
    commit(versions[1], dataset)
    follow_job(job, dataset, run, pipeline, resume=True, **CACHED)
    assert_equal(run, whole)


def test_dataset_that_disappears_is_refused_by_name(
    job: Path, versions: list[Path], tmp_path: Path
) -> None:
    pipeline = Pipeline(versions, tmp_path / "dataset")

    def on_step(metric: StepMetric, num_steps: int) -> None:
        if metric.step == 5:
            shutil.rmtree(tmp_path / "dataset" / MANIFESTS)

    message = (
        f"there is no dataset: no build was committed in {tmp_path / 'dataset'}; build it, or "
        "correct the path"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        follow_job(job, tmp_path / "dataset", tmp_path / "run", pipeline, on_step=on_step)


def test_resuming_a_grown_dataset_without_following_it_is_refused(
    job: Path, versions: list[Path], tmp_path: Path
) -> None:
    pipeline = Pipeline(versions, tmp_path / "dataset")
    on_step = stopping_at(5, pipeline.on_step)
    with pytest.raises(StoppedError):
        follow_job(job, tmp_path / "dataset", tmp_path / "run", pipeline, on_step=on_step)
    pipeline.commit_next()
    message = (
        "dataset has grown since the run: 2 segments instead of 1 in "
        f"{tmp_path / 'run' / RUN_FILE}; "
        "use --follow to continue with the new ones"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        run_job(job, tmp_path / "dataset", tmp_path / "run", resume=True)


def test_dataset_that_grows_after_the_first_of_two_epochs_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", epochs="2")
    versions = make_versions(tmp_path / "versions", job, GROWING[1:3])
    run_job(job, versions[0], tmp_path / "run", steps=6)
    commit(versions[1], versions[0])
    message = (
        "dataset has grown after its first epoch: 2 segments instead of 1 "
        f"in {tmp_path / 'run' / RUN_FILE}; train again"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        follow_job(
            job, versions[0], tmp_path / "run", Pipeline([], tmp_path / "unused"), resume=True
        )


@pytest.mark.slow
def test_run_waits_for_the_index_of_a_segment_and_refuses_a_sealed_dataset_without(
    job: Path, versions: list[Path], tmp_path: Path
) -> None:
    dataset, run = tmp_path / "dataset", tmp_path / "run"
    pipeline = Pipeline(versions[:2], dataset)

    def on_wait(message: str) -> None:
        pipeline.messages.append(message)
        if len(pipeline.messages) == 1:
            pipeline.commit_next()
            commit_changed(dataset, indexes=read_dataset(versions[0]).indexes)
        else:
            commit_changed(dataset, sealed=True)

    pipeline.on_wait = on_wait  # type: ignore[method-assign]
    with pytest.raises(SchemaError, match=r"^dataset has no index for batch_samples=64"):
        follow_job(job, dataset, run, pipeline, **CACHED)
    assert pipeline.messages[1].startswith("waiting at step 12: dataset has no index for batch")
    assert "python -m presage.pipelines oracle" in pipeline.messages[1]
    assert len(read_metrics(run / METRICS)) == 12
    commit(versions[-1], dataset)
    follow_job(job, dataset, run, Pipeline([], dataset), resume=True, **CACHED)
    assert verify_run(run).problems == ()


@pytest.mark.slow
def test_cache_that_a_later_segment_does_not_fit_keeps_what_was_trained(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", **ONCE, policy="belady", rows="225")
    versions = make_versions(tmp_path / "versions", job, [[(64, 0)], [(700, 0)]])
    pipeline = Pipeline(versions, tmp_path / "dataset")
    with pytest.raises(PlanError, match=r"use at least \d+"):
        follow_job(job, tmp_path / "dataset", tmp_path / "run", pipeline, **CACHED)
    assert steps_of(tmp_path / "run") == [1]
    assert len(read_metrics(tmp_path / "run" / METRICS)) == 1
