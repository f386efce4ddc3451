"""What the scheduler chose for both pools, and how fast this dataset was built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.report.html import Section, bullets, paragraph, table
from pipelines.report.numbers import count, digits, memory, size
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


def pools_section(plan: Mapping[str, Any] | None, build: Mapping[str, Any] | None) -> Section:
    """Return the section about the build and both pools.

    Args:
        plan: what `scheduler plan --json` prints, or None.
        build: what `build --json` prints, or None; one of them is given.

    Raises:
        SchemaError: one lacks a key.
    """
    try:
        measured = _build_table(build) if build else ""
        if plan is not None:
            return _plan_section(plan, measured)
        assert build is not None, "a section about neither is not asked for"
        finding = f"The build made {count(build['rows_per_sec'])} samples per second."
    except (KeyError, TypeError) as error:
        name = PLAN if plan else BUILD
        raise SchemaError(
            f"{name} must have the keys of what its command prints, got no or another {error}; "
            "print it anew"
        ) from error
    return Section("plan", "Build", finding, measured)


def _plan_section(plan: Mapping[str, Any], measured: str) -> Section:
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
        ("memory", memory(before["memory_bytes"]), memory(after["memory_bytes"])),
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
        f"{digits(plan['predicted_sec'])} seconds and cost {plan['cost']:.3g} at the job's prices."
        f"{trust}",
        table("Sizes of both pools", ["", "preprocessing", "training"], rows)
        + paragraph("Why:")
        + bullets([str(reason) for reason in plan["reasons"]])
        + measured,
    )


def _build_table(build: Mapping[str, Any]) -> str:
    return table(
        "The build of this dataset, as it was measured",
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
