"""Segment jobs of a scheduled job on a Flink session cluster that another job uses, too."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from presage.pipelines.cli import main as pipelines
from presage.scheduler.controller.log import LOG
from presage.scheduler.controller.replay import replay
from tests.flink import ask, flink, needs_flink, runner_file
from tests.integration.scheduled_jobs import Scheduler, send, words_for
from tests.integration.small_demo import write_small_demo
from tests.pipelines.logs import bytes_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

SLOTS = 4
SMALL = {
    "num_samples: 200000": "num_samples: 8000",
    "oracle: {batch_samples: 4096}": "oracle: {batch_samples: 1024}",
    "\n  batch_samples: 4096": "\n  batch_samples: 1024",
}
SCHEDULE = """
schedule:
  budget: {cpus: 8, memory: 32GiB}
  preprocessing: {min_workers: 4, max_workers: 4}
"""
HOLDER = """
import sys, time
from pathlib import Path
import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

def hold(path):
    while not Path(path).exists():
        time.sleep(0.2)

with beam.Pipeline(options=PipelineOptions(sys.argv[2:])) as pipeline:
    pipeline | beam.Create([sys.argv[1]]) | beam.Map(hold)
"""
"""Holds a slot until a file is there."""


def write_job(repository: Path, folder: Path) -> tuple[Path, Path]:
    """Write the demo job with three small files."""
    text = write_small_demo(repository, folder, SMALL)
    job, log = folder / "demo.yaml", folder / "log"
    job.write_text(text.rstrip() + SCHEDULE)
    assert pipelines(["generate", str(job), "--output", str(log)]) == 0
    for extra in sorted(log.rglob("*.parquet"))[3:]:
        extra.unlink()
    return job, log


@contextmanager
def held_slot(about: dict[str, Any], folder: Path) -> Iterator[Path]:
    """Let another job have one slot until a file is there, at the latest until the end."""
    release = folder / "release"
    options = [o for o in about["options"] if not o.startswith("--parallelism")]
    words = [str(release), *options, "--parallelism=1", "--job_name=somebody-else"]
    with (folder / "holder").open("wb") as log:
        holder = subprocess.Popen([sys.executable, "-c", HOLDER, *words], stdout=log, stderr=log)
        try:
            while ask(about["rest"], "/overview")["slots-available"] == SLOTS:
                assert holder.poll() is None, (folder / "holder").read_text()
                time.sleep(0.2)
            yield release
        finally:
            release.touch()
            assert holder.wait(120) == 0, (folder / "holder").read_text()


def jobs_of(rest: str, part: str) -> list[dict[str, Any]]:
    """Return the jobs of the cluster whose name has a part."""
    return [job for job in ask(rest, "/jobs/overview")["jobs"] if part in job["name"]]


def parallelism(rest: str, part: str) -> set[int]:
    """Return the largest parallelism of each of these jobs."""
    found = [ask(rest, f"/jobs/{job['jid']}")["vertices"] for job in jobs_of(rest, part)]
    return {max(stage["parallelism"] for stage in stages) for stages in found}


def local_dataset(job: Path, log: Path, dataset: Path) -> dict[str, bytes]:
    """Return what the local runner builds of the same segments."""
    for number, path in enumerate(sorted(log.rglob("*.parquet"))):
        source = ["--input", str(log), "--only", str(path.relative_to(log))]
        source += ["--final"] if number == 2 else []
        first = ["build", str(job), "--output", str(dataset)]
        later = ["append", str(job), "--dataset", str(dataset), "--position", str(number)]
        assert pipelines([*(later if number else first), *source]) == 0
    return bytes_of(dataset)


@needs_flink
def test_job_on_a_cluster_that_is_shared_waits_in_its_queue_and_builds_the_same_dataset(
    repository: Path, tmp_path: Path
) -> None:
    job, log = write_job(repository, tmp_path)
    output = tmp_path / "out"
    words = words_for(tmp_path, [job], "--input", str(log), "--status", "off", cpus=8)
    with (
        flink("session", repository, tmp_path / "flink", SLOTS) as about,
        held_slot(about, tmp_path) as release,
    ):
        rest = about["rest"]
        words += ["--runner", str(runner_file(about, tmp_path / "runner.yaml", 2))]
        scheduler = Scheduler(repository, words, tmp_path / "scheduler")
        # The first attempt is killed while its job runs: the job outlives it, and is cancelled.
        scheduler.until(lambda: any(j["tasks"]["running"] for j in jobs_of(rest, "segment-0-1-")))
        send(output, "demo", "segment-0.1")
        scheduler.until(lambda: jobs_of(rest, "segment-0-1-")[0]["state"] == "CANCELED")
        # Two jobs with two workers each need a slot more than is free: Flink queues one of them.
        scheduler.until(lambda: jobs_of(rest, "segment-1-1-") and jobs_of(rest, "segment-2-1-"))
        state = scheduler.result()["demo"]
        assert parallelism(rest, "segment-1-1-") == parallelism(rest, "segment-2-1-") == {2}
        assert ask(rest, "/overview")["slots-available"] == SLOTS - 1
        release.touch()
    assert (state["phase"], state["segments_built"]) == ("finished", 3)
    assert not replay(output / LOG).differences
    local = local_dataset(job, log, tmp_path / "local")
    assert bytes_of(output / "demo" / "dataset") == local
