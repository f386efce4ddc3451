"""What the scheduler chose for both pools, and how fast this dataset was built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.report_html import Section, bullets, paragraph, table
from pipelines.report_numbers import count, digits, size
from schemas.errors import SchemaError

PLAN, BUILD = "plan.json", "build.json"


def read_object(path: Path) -> Mapping[str, Any] | None:
    """Read a JSON object that a command printed, None when there is no such file.

    Raises:
        SchemaError: the file holds something else.
    """
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SchemaError(f"file must hold JSON, got {error}; print it anew", file=str(path)) from (
            error
        )
    if not isinstance(found, dict):
        raise SchemaError("file must hold a JSON object, got another value", file=str(path))
    return found


def plan_section(plan: Mapping[str, Any]) -> Section:
    """Return the section about both pools.

    Args:
        plan: what `scheduler plan --json` prints.
    """
    before, after = plan["preprocessing"], plan["training"]
    stores = f" and {_counted(after['num_stores'], 'store')}" if after["num_stores"] else ""
    jobs = _counted(before["segment_jobs"], "segment job")
    pools = (
        f"{jobs} x {_counted(before['workers_per_job'], 'worker')}",
        f"{_counted(after['num_replicas'], 'replica')}{stores}",
    )
    rows = [
        ("processes", *pools),
        ("cores", f"{before['cpus']:g}", f"{after['cpus']:g}"),
        ("memory", size(before["memory_bytes"]), size(after["memory_bytes"])),
        (
            "samples per second",
            count(before["rows_per_sec"]),
            count(after["samples_per_sec"]),
        ),
    ]
    trust = "" if plan["confident"] else " The models behind it have seen too little to be sure."
    return Section(
        "plan",
        "Plan of both pools",
        f"{pools[0]} and {pools[1]} are predicted to go from raw log to trained model in "
        f"{digits(plan['predicted_sec'])} seconds at a cost of {plan['cost']:.3g}.{trust}",
        table("Sizes of both pools", ["", "preprocessing", "training"], rows)
        + paragraph("Why:")
        + bullets([str(reason) for reason in plan["reasons"]]),
    )


def build_table(build: Mapping[str, Any]) -> str:
    """Return what a build measured of itself.

    Args:
        build: what `build --json` prints.
    """
    return table(
        "The build of this dataset",
        ["", "input", "samples", "start-up", "build", "samples per second"],
        [
            (
                "measured", size(build["input_bytes"]), count(build["num_samples"]),
                f"{build['startup_sec']:.1f} s", f"{build['wall_sec']:.1f} s",
                count(build["rows_per_sec"]),
            )
        ],
    )  # fmt: skip


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
