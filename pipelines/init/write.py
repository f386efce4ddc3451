"""A plan as a job file and a schema, with the reason of each choice beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime

from pipelines.init.columns import quoted
from pipelines.init.files import Kind
from pipelines.init.plan import Feature, Plan, Side, num_rows_of, type_of

_PLAIN = re.compile(r"(?!(?:true|false|null|yes|no|on|off|y|n)$)[A-Za-z_][A-Za-z0-9_]*", re.I)
_WIDTH = 96


def job_text(plan: Plan, name: str, folder: str, split: datetime | None) -> str:
    """Return the text of `job.yaml`.

    Args:
        plan: what was chosen.
        name: of the job.
        folder: where the files are, for the comment.
        split: from when on samples are for evaluation; None when that is not known.
    """
    lines = [
        f"# A first job for the files in {folder}, written by `python -m pipelines init`.",
        "# Every choice has its reason beside it: correct what is wrong, then look again with",
        "#     python -m pipelines preview JOB --input DIR",
        "# docs/job.md explains each key; schema.pbtxt beside it has the roles of columns.",
        *_left_out(plan),
        f"name: {_word(name)}",
        "data:",
        "  sources:",
        *_source(plan.kind, "    "),
    ]
    if plan.sides:
        lines += ["  sides:  # looked up by `samples.joins`", *_sides(plan.sides)]
    lines += ["  samples:", *_statement(plan)]
    if plan.sides:
        lines += ["    joins:", *(f"      - {_join(side)}" for side in plan.sides)]
    key, why = plan.session
    gap = ", gap: 30m" if plan.has_gap else ""
    lines += [
        *_comment(f"session.key: {why}.", "  "),
        *_comment(f"session.time: {plan.time[1]}.", "  "),
        f"  session: {{key: {_word(key)}, time: {_word(plan.time[0])}{gap}}}",
        *_split(plan, split),
        "  # Dedup groups are chosen at the build, by a look at whole sessions; job.yaml of the",
        "  # dataset names them. To choose them yourself: groups: {user: [user_id, age]}",
        "  groups: auto",
        *_transforms(plan),
    ]
    if plan.tables:
        lines += [
            "  # Embedding tables. Features that mean the same things share one. num_rows leaves",
            "  # room that hashed values seldom share a row; they need no list of values.",
            "  tables:",
            *_tables(plan),
        ]
    else:
        lines += ["  tables: {}  # no column holds ids"]
    if plan.label is not None and plan.tables:
        lines += _training(plan)
    elif plan.label is None:
        lines += [
            "# No column is a label: the dataset can be built and read, but nothing trained on it.",
            '# Make one in SQL (0 or 1) and tag it "label" in schema.pbtxt.',
        ]
    return "\n".join(lines) + "\n"


def _transforms(plan: Plan) -> Iterator[str]:
    if plan.transforms:
        yield "  # Features that are made of columns; schema.pbtxt says why."
        yield "  transforms:"
        yield "    samples:"
    for name, text in plan.transforms.items():
        yield f"      {_word(name)}: {text if text[0] == '{' else json.dumps(text)}"


def _training(plan: Plan) -> Iterator[str]:
    batch = min(4096, max(64, 1 << max(1, plan.num_samples // 50).bit_length() - 1))
    yield from _comment(
        f"For about {plan.num_samples} samples: 50 steps or more of at most 4,096.", "  "
    )
    yield f"  block_samples: {min(1024, batch)}"
    yield f"  oracle: {{batch_samples: {batch}}}  # as in train:"
    yield "# A small model to begin with; docs/job.md has others, and optimizers and metrics."
    yield "train:"
    yield "  model: {name: dlrm, bottom_layers: [64], top_layers: [128, 64]}"
    yield "  embedding_dim: 16"
    yield f"  batch_samples: {batch}"
    yield "  epochs: 1"


def _left_out(plan: Plan) -> Iterator[str]:
    for what, why in plan.left_out:
        yield from _comment(f"Not used: {what}: {why}.", "")


def _source(kind: Kind, indent: str) -> Iterator[str]:
    yield from _comment(
        f"{len(kind.files)} file{'s' * (len(kind.files) > 1)}, {kind.num_bytes / 1e6:.1f} MB; "
        "types as of the first rows.", indent,
    )  # fmt: skip
    yield f"{indent}{kind.name}:"
    yield from _config(kind, indent + "  ")


def _config(kind: Kind, indent: str) -> Iterator[str]:
    config = kind.config
    yield f"{indent}files: {json.dumps(config.files)}"
    yield f"{indent}format: {config.format}"
    if config.format == "csv":
        if config.delimiter != ",":
            yield f"{indent}delimiter: {json.dumps(config.delimiter)}"
        if config.quote is None:
            yield f"{indent}quote: null  # quotes are plain text"
        if not config.header:
            yield f"{indent}header: false  # the first line is a row: give c0, c1, ... names"
    if config.columns:
        yield f"{indent}columns:"
        for name, word in config.columns.items():
            for path, note in kind.notes.items():
                if path.split(".")[0] == name:
                    yield from _comment(f"{path}: {note}.", f"{indent}  ")
            yield f"{indent}  {_word(name)}: {word if _PLAIN.fullmatch(word) else json.dumps(word)}"
    if config.partitions:
        names = ", ".join(f"{_word(name)}: {kind}" for name, kind in config.partitions.items())
        yield f"{indent}partitions: {{{names}}}  # of folder names"


def _sides(sides: Sequence[Side]) -> Iterator[str]:
    for side in sides:
        yield from _comment(f"{side.why}; {_keys(side)}.", "    ")
        yield f"    {side.kind.name}:"
        yield f"      key: {_word(side.key)}"
        if side.time is not None:
            yield f"      time: {_word(side.time)}"
        yield from _config(side.kind, "      ")


def _keys(side: Side) -> str:
    if side.time is not None:
        return f"several rows of a key, each holds from its {side.time} on"
    whole = "" if side.kind.is_whole else " among the rows that were looked at"
    return (
        f"no {side.key} stands twice{whole}. What it says may be newer than a sample: drop columns "
        "that give the label away"
    )


def _join(side: Side) -> str:
    key = "" if side.asked == side.key else f"key: {_word(side.asked)}, "
    same = all(new == old for new, old in side.columns.items())
    names = ", ".join(map(_word, side.columns))
    pairs = ", ".join(f"{_word(new)}: {_word(old)}" for new, old in side.columns.items())
    columns = f"[{names}]" if same else f"{{{pairs}}}"
    return f"{{side: {side.kind.name}, {key}columns: {columns}}}"


def _statement(plan: Plan) -> Iterator[str]:
    looked_up = {name for side in plan.sides for name in side.columns}
    elsewhere = looked_up | plan.transforms.keys()
    columns = [f.column for f in plan.features if f.column.name not in elsewhere]
    if plan.unnested is not None:
        yield f"    # One sample for each entry of {plan.unnested}, which say what became of each."
    yield from _comment(
        "One SELECT over the rows of the source; a row that it fails on is a reject.", "    "
    )
    yield "    map: |"
    for index, column in enumerate(columns):
        same = column.expr == quoted(column.name)
        text = column.expr if same else f"{column.expr} AS {quoted(column.name)}"
        comma = "," if index + 1 < len(columns) else ""
        yield f"      {'SELECT ' if not index else '       '}{text}{comma}"
    yield f"      FROM {plan.inner}"


def _split(plan: Plan, split: datetime | None) -> Iterator[str]:
    if split is not None:
        yield "  # About the last tenth of the rows is for evaluation."
        yield f"  split: {{evaluation_from: {split}}}"
    elif plan.is_timed:
        yield "  # All samples are for training; hold back the last ones by"
        yield "  # split: {evaluation_from: 2026-01-31}"


def _tables(plan: Plan) -> Iterator[str]:
    scale = max(1.0, plan.kind.num_rows / plan.kind.rows.num_rows)
    for name, features in plan.tables.items():
        names = ", ".join(_word(f.column.name) for f in features)
        size = num_rows_of(features, scale)
        yield f"    {_word(name)}: {{features: [{names}], num_rows: {size}}}"


def schema_text(plan: Plan) -> str:
    """Return the text of `schema.pbtxt`."""
    lines = [
        "# Columns of the samples, each with its role: sparse (an id that looks into a table),",
        "# dense (a number that a model reads), label, weight, label_time, or kept (stored, read",
        "# by no model). docs/job.md explains them.",
    ]
    for feature in plan.features:
        lines += [*_comment(feature.why, ""), _feature(feature)]
    return "\n".join(lines) + "\n"


def _feature(feature: Feature) -> str:
    column = feature.column
    count = " value_count { min: 0 }" if column.shape == "list" else ""
    domain = " int_domain { min: 0 max: 1 }" if feature.role == "label" else ""
    return (
        f"feature {{ name: {json.dumps(column.name)} type: {type_of(column)}{count}{domain} "
        f'annotation {{ tag: "{feature.role}" }} }}'
    )


def _comment(text: str, indent: str) -> Iterator[str]:
    line = f"{indent}#"
    for word in text.split():
        if len(line) + 1 + len(word) > _WIDTH and line.strip() != "#":
            yield line
            line = f"{indent}#"
        line += f" {word}"
    yield line


def _word(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
