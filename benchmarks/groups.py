"""Bytes and values of datasets with groups that the job names, and with `groups: auto`.

`python -m benchmarks.groups [--json] [--datasets NAME,NAME] [--shared-data DIR]`

The logs are those of `benchmarks.storage`. Each is built twice: by its job, and by the same job
with `groups: auto`. `bytes` are samples and groups with all that belongs to them (`dataset_bytes`
of the manifests); `values` are the values that a reader decodes and looks up: lists that are
stored, entry by entry. Neither depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.storage import LOGS, MADE_LOGS, REPOSITORY, build_job, job_path, raw_log
from schemas.dataset import Dataset, open_dataset


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


def sizes_of(dataset: Dataset) -> dict[str, Any]:
    """Return what a dataset takes: bytes, values, and its groups."""
    manifests = [segment.manifest for segment in dataset.segments]
    grouped = dataset.job.data.group_of_column
    values = 0
    for manifest in manifests:
        own = [name for name in manifest.columns if name not in grouped]
        values += len(own) * manifest.num_samples
        for name, group in manifest.groups.items():
            columns = dataset.job.data.groups[name]
            values += len(columns) * group.num_unique + group.num_values_dedup
            values += manifest.num_samples  # the inverse index
    return {
        "bytes": sum(manifest.dataset_bytes for manifest in manifests),
        "values": values,
        "groups": {name: list(columns) for name, columns in dataset.job.data.groups.items()},
    }


def details(name: str, log: Path, scratch: Path) -> dict[str, Any]:
    """Build one log both ways; ratios are `auto` over `named`."""
    job = job_path(name, scratch)
    found: dict[str, Any] = {}
    for side, path in (("named", job), ("auto", with_auto(job, scratch))):
        build_job(path, log, scratch / side)
        found[side] = sizes_of(open_dataset(scratch / side))
    ratios = {
        key: round(found["auto"][key] / found["named"][key], 4) for key in ("bytes", "values")
    }
    return {**found, "ratios": ratios}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.groups")
    parser.add_argument("--json", action="store_true", help="print details as JSON")
    parser.add_argument("--datasets", default=",".join([*LOGS, *MADE_LOGS]))
    parser.add_argument("--shared-data", type=Path, default=REPOSITORY.parent / "shared" / "data")
    options = parser.parse_args(argv)
    found: dict[str, Mapping[str, Any]] = {}
    for name in options.datasets.split(","):
        with tempfile.TemporaryDirectory(prefix="presage-groups-") as scratch:
            log = raw_log(name, options.shared_data, Path(scratch))
            if log is None:
                print(f"{name}: no raw log below {options.shared_data}", file=sys.stderr)
                continue
            found[name] = details(name, log, Path(scratch))
            if not options.json:
                print(name, found[name]["ratios"], flush=True)
    if options.json:
        print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
