"""Logs that benchmarks read, and what the benchmarks over several logs have in common."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.clickout_log import ClickoutConfig, write_clickouts
from pipelines.build import build
from pipelines.context import BuildRequest
from pipelines.demo_log.log import GeneratorConfig, write_log
from schemas.config.job import load_job

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
LOGS = {
    "mind": "mind",
    "ebnerd": "ebnerd_test",
    "demo": None,
    "kuairand": "kuairand_pure_part",
    "thirtymusic": "30music_sample10",
}
"""Shipped job -> its log below the shared data, None where the log is generated."""
MADE_LOGS = {
    "clickouts": ClickoutConfig(num_sessions=7400),
    "clickouts_hourly": ClickoutConfig(num_sessions=7400),
    "short_sessions": ClickoutConfig(
        num_sessions=60_000, requests=1.0, shown=3, actions=1.0, seed=1
    ),
    "no_repeats": ClickoutConfig(
        num_sessions=60_000, requests=1.0, shown=1, actions=2.0, num_cities=10**9, seed=2
    ),
    "ten_rows": ClickoutConfig(num_sessions=1, requests=1.0, shown=10, seed=3),
}
"""Logs for `benchmarks/clickouts/job.yaml`, one of them with windows of an hour."""


def log_parser(module: str, doc: str | None, names: Iterable[str]) -> argparse.ArgumentParser:
    """Return a parser with the options that benchmarks over several logs share.

    Args:
        module: below `benchmarks`.
        doc: description.
        names: logs that are read where `--datasets` is not given.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=doc)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--datasets", default=",".join(names), help="logs, by comma")
    parser.add_argument("--shared-data", type=Path, default=SHARED_DATA)
    return parser


def each_log(options: argparse.Namespace) -> Iterator[tuple[str, Path, Path]]:
    """Yield the name and directory of each log that is there, and a directory to work in.

    Args:
        options: parsed by `log_parser`.

    Raises:
        SystemExit: a name is not one of a log, or no log is there.
    """
    names, known = options.datasets.split(","), [*LOGS, *MADE_LOGS]
    if unknown := [n for n in names if n not in known]:
        sys.exit(f"error: --datasets must be of {', '.join(known)}, got {unknown[0]!r}")
    num_logs = 0
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            log = raw_log(name, options.shared_data, Path(scratch))
            if log is None:
                sys.stderr.write(f"skipped {name}, its log is not in {options.shared_data}\n")
                continue
            num_logs += 1
            yield name, log, Path(scratch)
    if not num_logs:
        sys.exit("error: benchmark must have a log, got none; give --shared-data")


def write_result(result: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Write a result to standard output, on one line with `--json`."""
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")


def raw_log(name: str, shared_data: Path, scratch: Path) -> Path | None:
    """Return the directory of a log, made where it is synthetic; None where it is missing."""
    if name in MADE_LOGS:
        write_clickouts(MADE_LOGS[name], scratch / "log")
        return scratch / "log"
    folder = LOGS[name]
    if folder is not None:
        found = shared_data / folder
        return found if found.is_dir() else None
    config = load_job(job_path(name)).data.generate
    assert config is not None, "the demo's job says how its log is generated"
    write_log(
        GeneratorConfig(
            num_samples=config.num_samples, seed=config.seed, start=config.start, span=config.span
        ),
        scratch / "log",
    )
    return scratch / "log"


def job_path(name: str, scratch: Path | None = None) -> Path:
    """Return the job file of a log, in `scratch` where it is made of another."""
    if name not in MADE_LOGS:
        return REPOSITORY / "schemas" / name / "job.yaml"
    job = REPOSITORY / "benchmarks" / "clickouts"
    if name != "clickouts_hourly" or scratch is None:
        return job / "job.yaml"
    shutil.copytree(job, scratch / "job")
    text = (job / "job.yaml").read_text()
    hourly = text.replace("  split:", "  window: {span: 1h}\n  split:", 1)
    (scratch / "job" / "job.yaml").write_text(hourly)
    return scratch / "job" / "job.yaml"


def with_auto(job: Path, scratch: Path) -> Path:
    """Write a job with `groups: auto` beside a copy of its schema; transforms lie in `samples`."""
    folder = shutil.copytree(job.parent, scratch / "auto")
    body = yaml.safe_load(job.read_text(encoding="utf-8"))
    data = body["data"]
    data["groups"] = "auto"
    if made := data.get("transforms"):
        data["transforms"] = {"samples": {k: v for each in made.values() for k, v in each.items()}}
    (folder / job.name).write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf-8")
    return folder / job.name


def build_job(job: Path, log: Path, dataset: Path) -> dict[str, Any]:
    """Build a dataset on the local runner and return what `build --json` prints of it."""
    return build(
        BuildRequest(
            job_path=job, input_root=log, dataset=dataset, beam_args=[], attempt="benchmark"
        )
    )
