"""Write a first job for the files of a folder, and look at what a build would make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from pipelines.init.columns import plain_name
from pipelines.init.files import kinds_of
from pipelines.init.plan import Plan, plan_of, typed
from pipelines.init.whole import evaluation_from, is_unique
from pipelines.init.write import job_text, schema_text
from pipelines.preview.preview import PreviewRequest, preview
from pipelines.sources.folder import folder_of
from schemas.columns import is_text
from schemas.errors import SchemaError

MANY_REJECTS = 0.02
"""Share of the rows that are tried from which on their rejects are said."""
JOB, SCHEMA = "job.yaml", "schema.pbtxt"


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRequest:
    """What is to be described.

    Attributes:
        input_root: directory of raw files, or its URL.
        output: directory for `job.yaml` and `schema.pbtxt`.
        say: told what is going on, one line at a time.
    """

    input_root: Path | str
    output: Path
    say: Callable[[str], None] = lambda _: None


def init(request: InitRequest) -> dict[str, Any]:
    """Write a first job for some files.

    Returns:
        What `init --json` prints.

    Raises:
        SchemaError: there is a job already, or no file that can be read.
    """
    for name in (JOB, SCHEMA):
        if (request.output / name).exists():
            raise SchemaError(
                "job must not be there yet, got one; choose another --output, or remove it",
                file=str(request.output / name),
            )
    folder = folder_of(request.input_root)
    with TemporaryDirectory(prefix="presage-init-") as scratch:
        kinds, others = kinds_of(folder, Path(scratch))
    kinds = [typed(kind) for kind in kinds]
    unique = {
        (kind.name, column): is_unique(folder, kind, column)
        for kind in (kinds if len(kinds) > 1 else [])
        for column in kind.rows.column_names
        if pa.types.is_integer(kind.rows[column].type) or is_text(kind.rows[column].type)
    }
    plan = plan_of(kinds, unique)
    plan.left_out += [(path, "no format that can be read, or no rows") for path in others]
    for kind in kinds:
        own = kind.config.columns or kind.rows.column_names
        gone = [path for path in kind.notes if path.split(".")[0] not in own]
        plan.left_out += [(f"{path} of {kind.name}", kind.notes[path]) for path in gone]
    time = next(f.column for f in plan.features if f.column.name == plan.time[0])
    split = None
    if plan.is_timed:
        with TemporaryDirectory(prefix="presage-init-") as scratch:
            split = evaluation_from(folder, plan.kind, time.expr, Path(scratch), request.say)
    root = Path(str(request.input_root).rstrip("/"))
    request.output.mkdir(parents=True, exist_ok=True)
    name = plain_name(root.name or "log")
    job = request.output / JOB
    job.write_text(job_text(plan, name, str(request.input_root), split), encoding="utf-8")
    (request.output / SCHEMA).write_text(schema_text(plan), encoding="utf-8")
    for line in summary(plan):
        request.say(line)
    look = PreviewRequest(job_path=job, input_root=request.input_root)
    seen = preview(look)
    rejects = seen["rejects"]
    if rejects["share"] > MANY_REJECTS:
        reason = rejects["reasons"][0]
        request.say(
            f"WARNING: {rejects['share']:.0%} of the first rows are rejected, {reason['num']} of "
            f"{rejects['num']} by: {reason['reason']}; correct {job} before you build"
        )
    return {
        "job": str(job),
        "source": plan.kind.name,
        "sides": [side.kind.name for side in plan.sides],
        "session": plan.session[0],
        "time": plan.time[0],
        "label": None if plan.label is None else plan.label.column.name,
        "evaluation_from": None if split is None else split.isoformat(),
        "columns": {f.column.name: f.role for f in plan.features},
        "left_out": [what for what, _ in plan.left_out],
        "num_samples": seen["num_samples"],
        "num_rejects": seen["rejects"]["num"],
        "notes": seen["notes"],
    }


def summary(plan: Plan) -> list[str]:
    """Return what was chosen, for people."""
    label = plan.label
    lines = [
        f"samples: of {plan.kind.name} ({plan.kind.config.files}, {plan.kind.config.format})",
        f"session: {plan.session[0]} ({plan.session[1]})",
        f"time: {plan.time[0]} ({plan.time[1]})",
        f"label: {label.column.name} ({label.why})" if label else "label: none was found",
    ]
    lines += [f"side table: {side.kind.name} by {side.asked} ({side.why})" for side in plan.sides]
    lines += [f"not used: {what} ({why})" for what, why in plan.left_out]
    return lines
