"""A small job, with its schema, on disk; and the same as a snapshot without files."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from presage.scheduler.drivers.job_files import JobPaths
from presage.scheduler.model.past_runs import History, RunRecord
from presage.scheduler.model.plan_inputs import DataFacts, PlanInputs
from presage.scheduler.planner.candidates import pareto_front
from presage.schemas.config.job import load_job
from presage.schemas.config.schedule import ScheduleConfig
from presage.schemas.run.records import METRICS, SUMMARY, RunSummary, StepMetric, to_line
from presage.schemas.storage.location import Location
from presage.schemas.storage.versions import Versions

GIB = 1 << 30
JOB = """\
name: small
data:
  sources:
    log: {files: "*.parquet", format: parquet}
  samples:
    map: SELECT * FROM log
  session: {key: session_id, time: time}
  tables:
    users: {features: [user_id], num_rows: 1000}
    items: {features: [item_id, clicked_items], num_rows: 20000}
  groups:
    user: [user_id, clicked_items]
  block_samples: 16
  oracle: {batch_samples: 256}
  generate: {num_samples: 100000}
train:
  embedding_dim: 16
  batch_samples: 256
schedule:
SCHEDULE
"""

SCHEMA = """\
feature { name: "session_id" type: INT annotation { tag: "kept" } }
feature { name: "time" type: INT annotation { tag: "kept" } }
feature { name: "clicked" type: INT annotation { tag: "label" } }
feature { name: "user_id" type: INT annotation { tag: "sparse" } }
feature { name: "item_id" type: INT annotation { tag: "sparse" } }
feature { name: "clicked_items" type: INT value_count { min: 0 } annotation { tag: "sparse" } }
feature { name: "item_price" type: FLOAT annotation { tag: "dense" } }
"""


def write_job(folder: Path, schedule: str = "  priority: 0") -> Path:
    """Write the job and its schema; `schedule` are the indented lines of that section."""
    path = folder / "job.yaml"
    path.write_text(JOB.replace("SCHEDULE", schedule))
    (folder / "schema.pbtxt").write_text(SCHEMA)
    return path


def paths_of(
    folder: Path, job: Path | None = None, num_segments: int = 1, storage: str | None = None
) -> JobPaths:
    """Return the paths of a job with a file per segment; its files are in `folder` or at a URL."""
    return JobPaths(
        source=job or folder / "job.yaml",
        folder=folder,
        storage=Location.parse(storage or folder),
        input=Location.parse(folder / "log"),
        segments=tuple((f"{number}.parquet",) for number in range(num_segments)),
    )


def damage(paths: JobPaths) -> None:
    """Let a job have a dataset whose newest root is not JSON."""
    Versions(paths.dataset).commit(None, b"{")


FACTS = DataFacts(
    num_samples=1_000_000,
    num_train_samples=900_000,
    table_rows={"users": 50_000, "items": 200_000},
    rows_per_step=5_000.0,
    lookups_per_sample=20.0,
    row_bytes=800.0,
    part_rows=4_000.0,
    num_dense=4,
    num_sparse=6,
    measured=True,
)


def snapshot(
    folder: Path, schedule: ScheduleConfig, facts: DataFacts = FACTS, history: History | None = None
) -> PlanInputs:
    """Return the job with these limits, this data and this history."""
    job = replace(load_job(write_job(folder)), schedule=schedule)
    return PlanInputs(job=job, facts=facts, history=history or History())


def make_run(
    steps: Sequence[tuple[int, int, float]],
    embedding: str = "plain",
    expanded: bool = False,
    peak_bytes: int = 1 << 30,
) -> RunRecord:
    """Return a run of (replicas, samples, seconds) steps after a slow first one."""
    metrics = tuple(
        StepMetric(
            step=i,
            loss=0.5,
            num_samples=n,
            num_replicas=r,
            samples_per_sec=n / sec,
            phases={"forward": sec},
        )
        for i, (r, n, sec) in enumerate([(1, 1024, 99.0), *steps])
    )
    summary = RunSummary(
        num_steps=len(metrics),
        num_samples=sum(m.num_samples for m in metrics),
        loss_first=0.5,
        loss_last=0.5,
        ne=None,
        auc=None,
        gauc=None,
        samples_per_sec=1.0,
        cache_hit_rate=None,
        fetched_rows=0,
        peak_rss_bytes=peak_bytes,
        embedding=embedding,
        expanded=expanded,
    )
    return RunRecord("run", summary, metrics)


def write_run(folder: Path, sec: float, num_steps: int = 20) -> None:
    """Leave what a finished run leaves: steps of 256 samples, equally long but for the first."""
    run = make_run([(1, 256, sec)] * (num_steps - 1), peak_bytes=900 << 20)
    folder.mkdir(parents=True)
    (folder / METRICS).write_text("".join(f"{to_line(metric)}\n" for metric in run.metrics))
    (folder / SUMMARY).write_text(json.dumps(asdict(run.summary)))


def hypervolume(objectives: np.ndarray, reference: tuple[float, float]) -> float:
    """Return the area that points dominate up to a reference that is worse in both objectives."""
    inside = objectives[(objectives < np.array(reference)).all(axis=1)]
    best = inside[pareto_front(inside)]
    if not len(best):
        return 0.0
    widths = np.diff(np.append(best[:, 0], reference[0]))
    return float(widths @ (reference[1] - best[:, 1]))
