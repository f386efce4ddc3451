"""Bytes and values of datasets with groups that the job names, and with `groups: auto`.

`python -m benchmarks.groups [--json] [--datasets NAME,NAME] [--shared-data DIR]`

Each log of `benchmarks/logs.py` is built twice: by its job, and by the same job
with `groups: auto`. `bytes` are samples and groups with all that belongs to them (`dataset_bytes`
of the manifests); `values` are the values that a reader decodes and looks up: lists that are
stored, entry by entry. Neither depends on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.logs import (
    LOGS,
    MADE_LOGS,
    build_job,
    each_log,
    job_path,
    log_parser,
    with_auto,
    write_result,
)
from schemas.dataset import Dataset, open_dataset


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


def headline(found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the bytes of all logs together, and the log where the chosen groups fare worst."""
    ours, peer = (sum(f[side]["bytes"] for f in found.values()) for side in ("auto", "named"))
    rounds = [round(f["named"]["bytes"] / f["auto"]["bytes"], 4) for f in found.values()]
    unit = f"bytes, groups: auto against groups that jobs name, {len(found)} logs"
    return {
        "ours": ours,
        "peer": peer,
        "ratio": round(peer / ours, 4),
        "unit": unit,
        "rounds": rounds,
        "worst": min(rounds),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it."""
    parser = log_parser("groups", __doc__, [*LOGS, *MADE_LOGS])
    options = parser.parse_args(argv)
    found: dict[str, dict[str, Any]] = {}
    for name, log, scratch in each_log(options):
        found[name] = details(name, log, scratch)
        sys.stderr.write(f"{name}: {found[name]['ratios']}\n")
    result = headline(found) | {"details": found}
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
