"""Logs, jobs, datasets and runs that several benchmarks share."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.clickouts import CLICKOUTS, write_clickouts
from presage.pipelines.build import build
from presage.pipelines.demo_log.example import generate_log
from presage.pipelines.prepare import BuildInput, BuildOptions, BuildRequest
from presage.pipelines.table.target import SegmentTarget
from presage.schemas.config.job import load_job
from presage.schemas.storage.location import Location

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
DEMO_JOB = REPOSITORY / "schemas" / "demo" / "job.yaml"
CLICKOUT_JOB = Path(__file__).parent / "clickouts" / "job.yaml"
LOGS = {
    "mind": "mind",
    "ebnerd": "ebnerd_test",
    "demo": None,
    "kuairand": "kuairand_pure_part",
    "thirtymusic": "30music_sample10",
}
"""Shipped job -> its log below the shared data, None where the log is generated."""
FORTNIGHT, FORTNIGHT_SPAN = "demo_fortnight", timedelta(days=14)
"""A longer log of the demo, whose last day is for evaluation."""
DEMO_SAMPLES = {"demo": None, "demo_small": 20_000, FORTNIGHT: 1_000_000}
"""Log of the demo -> its samples, None for those of the job."""
KNOWN_LOGS = (*LOGS, *CLICKOUTS, "demo_small", FORTNIGHT)


class MissingError(Exception):
    """A peer, a tool, a permission or data that a benchmark needs is not here."""


def each_log(options: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield the name and folder of each available log of `--datasets`, and an empty folder.

    Raises:
        MissingError: no log is available.
    """
    num_logs = 0
    for name in options.datasets:
        folder = scratch / name
        folder.mkdir()
        log = raw_log(name, options.shared_data, folder)
        if log is None:
            sys.stderr.write(f"skipped {name}, its log is not in {options.shared_data}\n")
            continue
        num_logs += 1
        yield name, log, folder
        shutil.rmtree(folder)
    if not num_logs:
        raise MissingError("a log must exist, got none; give --shared-data")


def raw_log(name: str, shared_data: Path, scratch: Path) -> Path | None:
    """Return the folder of a log, generated if it is synthetic; None if it is missing."""
    if name in CLICKOUTS:
        write_clickouts(CLICKOUTS[name], scratch / "log")
        return scratch / "log"
    if name in DEMO_SAMPLES:
        span = FORTNIGHT_SPAN if name == FORTNIGHT else None
        return write_demo(scratch / "log", DEMO_SAMPLES[name], span)
    path = shared_data / str(LOGS[name])
    return path if path.is_dir() else None


def write_demo(folder: Path, num_samples: int | None = None, span: timedelta | None = None) -> Path:
    """Write the demo's log, as the job configures it where an argument is None."""
    config = load_job(DEMO_JOB).data.generate
    assert config is not None, "the demo's job configures its generated log"
    config = config if span is None else replace(config, span=span)
    generate_log(config, Location.parse(folder), num_samples)
    return folder


def job_path(name: str, scratch: Path | None = None) -> Path:
    """Return the job file of a log; a modified job is written to `scratch`."""
    if name == FORTNIGHT and scratch is not None:
        body = read_job(DEMO_JOB)
        first = body["data"]["generate"]["start"]
        body["data"]["split"] = {"evaluation_from": first + FORTNIGHT_SPAN - timedelta(days=1)}
        return write_job_file(scratch / "job", body)
    if name == "clickouts_hourly" and scratch is not None:
        body = read_job(CLICKOUT_JOB)
        body["data"]["window"] = {"span": "1h"}
        return write_job_file(scratch / "job", body, CLICKOUT_JOB)
    if name in DEMO_SAMPLES:
        return DEMO_JOB
    return CLICKOUT_JOB if name in CLICKOUTS else REPOSITORY / "schemas" / name / "job.yaml"


def read_job(path: Path) -> dict[str, Any]:
    """Return a job file as plain dictionaries, to be modified."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def write_job_file(folder: Path, job: Mapping[str, Any], original: Path = DEMO_JOB) -> Path:
    """Write a modified job with a copy of the original's schema; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    schema = job["data"].get("schema", "schema.pbtxt")
    shutil.copy(original.parent / schema, folder / schema)
    return write_yaml(folder / "job.yaml", job)


def write_yaml(path: Path, body: Mapping[str, Any]) -> Path:
    """Write a file of YAML; return its path."""
    path.write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf-8")
    return path


def with_auto(job: Path, scratch: Path) -> Path:
    """Write a job with `groups: auto`; its transforms move to `samples`."""
    body = read_job(job)
    data = body["data"]
    data["groups"] = "auto"
    if by_group := data.get("transforms"):
        transforms = {k: v for each in by_group.values() for k, v in each.items()}
        data["transforms"] = {"samples": transforms}
    return write_job_file(scratch / "auto", body, job)


def build_job(job: Path, log: Path, dataset: Path, day: str | None = None) -> dict[str, Any]:
    """Build a dataset, or append a segment, in this process; return what `--json` prints."""
    append = dataset.exists()
    attempt = f"benchmark-{len([*dataset.glob('segments/*')])}"
    return build(
        BuildRequest(
            BuildInput(job, log),
            SegmentTarget(Location.parse(dataset), attempt, append=append, day=day),
            BuildOptions([] if day is None else ["--runner=InProcess"]),
        )
    )


def build_dataset(job: Path, log: Path, dataset: Path) -> Path:
    """Build a dataset, or append a segment, on the local runner; return the dataset's path."""
    build_job(job, log, dataset)
    return dataset


def demo_dataset(folder: Path, num_samples: int, job: Path = DEMO_JOB) -> Path:
    """Write a log of the demo and build its dataset, both in a folder; return its path."""
    return build_dataset(job, write_demo(folder / "log", num_samples), folder / "dataset")


def num_lines(path: Path) -> int:
    """Return the lines of a file, 0 if it does not exist: the committed steps of metrics."""
    return path.read_bytes().count(b"\n") if path.is_file() else 0
