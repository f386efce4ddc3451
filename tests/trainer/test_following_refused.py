"""What may not become of a dataset that a run follows, and what is left of the run then."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.errors import PlanError, SchemaError
from schemas.manifest import DatasetManifest, read_dataset
from schemas.run_log import METRICS, RUN_FILE, StepMetric, read_metrics
from schemas.storage import MANIFESTS
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
from tests.trainer.runs import assert_equal, run_job
from trainer.checkpoint.load import newest_checkpoint
from trainer.run import verify_run

__all__ = ["job", "versions", "whole"]


def changed(dataset: Path, **changes: object) -> None:
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
def test_dataset_that_was_replaced_is_refused_and_a_restored_one_gone_on_with(
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
            changed(dataset, **change(read_dataset(dataset)))

    text = message.format(dataset=dataset, schema=read_dataset(versions[0]).schema_sha256[:12])
    with pytest.raises(SchemaError, match=f"^{re.escape(text)}$"):
        follow_job(job, dataset, run, pipeline, on_step=on_step, embedding="cached")
    newest = newest_checkpoint(run)
    assert newest is not None
    assert int(newest.name) >= 9
    with pytest.raises(
        SchemaError, match=r"(must begin with the segments of the run|schema|manifest is missing)"
    ):
        follow_job(job, dataset, run, pipeline, resume=True, embedding="cached")
    commit(versions[1], dataset)
    follow_job(job, dataset, run, pipeline, resume=True, embedding="cached")
    assert_equal(run, whole)


def test_dataset_that_is_gone_is_refused_by_name(
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
    pipeline.more()
    message = (
        f"dataset must be that of the run, got 2 segments for 1 in {tmp_path / 'run' / RUN_FILE}; "
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
        "dataset must not grow after its first epoch, got 2 segments for the 1 that it was closed "
        f"with in {tmp_path / 'run' / RUN_FILE}; train again"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        follow_job(
            job, versions[0], tmp_path / "run", Pipeline([], tmp_path / "unused"), resume=True
        )


@pytest.mark.slow
def test_segment_without_its_index_is_waited_for_and_refused_when_none_follows(
    job: Path, versions: list[Path], tmp_path: Path
) -> None:
    dataset, run = tmp_path / "dataset", tmp_path / "run"
    pipeline = Pipeline(versions[:2], dataset)

    def say(line: str) -> None:
        pipeline.waits.append(line)
        if len(pipeline.waits) == 1:
            pipeline.more()
            changed(dataset, indexes=read_dataset(versions[0]).indexes)
        else:
            changed(dataset, sealed=True)

    pipeline.say = say  # type: ignore[method-assign]
    with pytest.raises(SchemaError, match=r"^dataset must have an index for batch_samples=64"):
        follow_job(job, dataset, run, pipeline, embedding="cached")
    assert pipeline.waits[1].startswith("waiting at step 12: dataset must have an index for batch")
    assert "python -m pipelines oracle" in pipeline.waits[1]
    assert len(read_metrics(run / METRICS)) == 12
    commit(versions[-1], dataset)
    follow_job(job, dataset, run, Pipeline([], dataset), resume=True, embedding="cached")
    assert verify_run(run).problems == ()


@pytest.mark.slow
def test_cache_that_a_later_segment_does_not_fit_keeps_what_was_trained(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", **ONCE, policy="belady", rows="200")
    versions = make_versions(tmp_path / "versions", job, [[(64, 0)], [(700, 0)]])
    pipeline = Pipeline(versions, tmp_path / "dataset")
    with pytest.raises(PlanError, match=r"use at least \d+"):
        follow_job(job, tmp_path / "dataset", tmp_path / "run", pipeline, embedding="cached")
    newest = newest_checkpoint(tmp_path / "run")
    assert newest is not None
    assert int(newest.name) == len(read_metrics(tmp_path / "run" / METRICS)) == 1


@pytest.mark.parametrize("text", ['{"segments": 3}', "[]"])
def test_identity_with_other_content_is_refused_by_name(
    text: str, job: Path, versions: list[Path], tmp_path: Path
) -> None:
    run_job(job, versions[0], tmp_path / "run", steps=1)
    (tmp_path / "run" / RUN_FILE).write_text(text)
    with pytest.raises(SchemaError, match=r"^identity must be JSON with dataset and train"):
        run_job(job, versions[0], tmp_path / "run", resume=True)
    assert json.loads(text) is not None
