"""Bytes and values of datasets with the groups of their jobs, and with `groups: auto`.

`python -m benchmarks.groups [--json] [--datasets NAME,NAME] [--shared-data DIR]`

Each log of `benchmarks/logs.py` is built twice: by its job, and by the same job with `groups:
auto`. `bytes` are samples and groups with all their files (`dataset_bytes` of the manifests);
`values` are the values that a reader decodes and looks up, stored lists counted by entry. Neither
depends on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.logs import (
    LOGS,
    SYNTHETIC_LOGS,
    build_dataset,
    each_log,
    job_path,
    log_parser,
    with_auto,
    write_result,
)
from schemas.dataset.opened import Dataset, open_dataset


def sizes_of(dataset: Dataset) -> dict[str, Any]:
    """Return the bytes, values and groups of a dataset."""
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
    sizes: dict[str, Any] = {}
    for side, path in (("named", job), ("auto", with_auto(job, scratch))):
        sizes[side] = sizes_of(open_dataset(build_dataset(path, log, scratch / side)))
    ratios = {
        key: round(sizes["auto"][key] / sizes["named"][key], 4) for key in ("bytes", "values")
    }
    return {**sizes, "ratios": ratios}


def headline(by_log: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the bytes of all logs, the ratio of each log, and the worst ratio."""
    ours, peer = (sum(f[side]["bytes"] for f in by_log.values()) for side in ("auto", "named"))
    rounds = [round(f["named"]["bytes"] / f["auto"]["bytes"], 4) for f in by_log.values()]
    unit = f"bytes, groups: auto against groups that jobs name, {len(by_log)} logs"
    return {
        "ours": ours,
        "peer": peer,
        "ratio": round(peer / ours, 4),
        "unit": unit,
        "rounds": rounds,
        "worst": min(rounds),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = log_parser("groups", __doc__, [*LOGS, *SYNTHETIC_LOGS])
    options = parser.parse_args(argv)
    by_log: dict[str, dict[str, Any]] = {}
    for name, log, scratch in each_log(options):
        by_log[name] = details(name, log, scratch)
        sys.stderr.write(f"{name}: {by_log[name]['ratios']}\n")
    write_result(headline(by_log) | {"details": by_log}, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
