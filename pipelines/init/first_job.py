"""Write a first job for the files of a folder.

`init` is the command; the choices are made in `sample_sources.py`, `columns.py` and `plan.py`. Here
they become the texts of `job.yaml` and `schema.pbtxt`, each with its reason as a comment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from presage.pipelines.autogroup.choose import yaml_word
from presage.pipelines.init.columns import plain_name, quoted, type_of
from presage.pipelines.init.plan import (
    JobPlan,
    PlannedFeature,
    Side,
    plan_of,
    typed,
)
from presage.pipelines.init.sample_sources import LogSource, find_sources
from presage.pipelines.preview import preview
from presage.pipelines.samples.statements import quoted_name
from presage.pipelines.sources.formats import empty_rows, format_of, input_splits, read_split
from presage.pipelines.sources.raw_rows import Folder, InputSplit, folder_of
from presage.pipelines.sources.rejects import Reject
from presage.pipelines.sources.text_records import decompressed
from presage.pipelines.sources.types import arrow_type, sql_type
from presage.schemas.arrays import is_text, one_chunk
from presage.schemas.config.sources import SourceConfig
from presage.schemas.dataset.files import replace_bytes
from presage.schemas.dataset.manifest import find_root
from presage.schemas.errors import SchemaError, pluralize
from presage.schemas.storage.location import Location

WARN_REJECT_FRACTION = 0.02
"""Share of rejects among the first rows above which `init` warns."""
JOB, SCHEMA = "job.yaml", "schema.pbtxt"
_FEW_ROWS = 1 << 10
_MANY_ROWS = 1 << 16
"""Least rows of a table, and the size up to which it has 64 rows per value."""
_MAX_TABLE = 1 << 22
_WIDTH = 96


def init(
    input_root: Path | str,
    output: Path | Location,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write a first job for some files.

    Returns:
        What `init --json` prints.

    Raises:
        SchemaError: the output has a job already, or no file can be read.
    """
    for name in (JOB, SCHEMA):
        if (output / name).exists():
            raise SchemaError(
                "job exists already; choose another --output, or remove it",
                file=str(output / name),
            )
    if "://" not in str(input_root) and find_root(input_root) is not None:
        raise SchemaError(
            "input is a dataset of Presage, which has its job; name a folder of logs",
            file=str(input_root),
        )
    folder = folder_of(input_root)
    with TemporaryDirectory(prefix="presage-init-") as scratch:
        sources, others = find_sources(folder, Path(scratch))
        plan = _make_plan(folder, sources)
        plan.left_out += [(path, "no readable format, or no rows") for path in others]
        plan.left_out += _dropped_columns(sources)
        split = None
        if plan.is_timed:
            time = next(f.column for f in plan.features if f.column.name == plan.time[0])
            windows = Path(scratch, "windows")
            split = evaluation_from(folder, plan.source, time.expr, windows, progress)
    name = plain_name(Path(str(input_root).rstrip("/")).name or "log")
    job = output / JOB
    replace_bytes(job, job_text(plan, name, str(input_root), split).encode())
    replace_bytes(output / SCHEMA, schema_text(plan).encode())
    for line in _summary(plan):
        progress(line)
    previewed = preview(job, input_root)
    rejects = previewed["rejects"]
    if rejects["share"] > WARN_REJECT_FRACTION:
        reason = rejects["reasons"][0]
        progress(
            f"WARNING: {rejects['share']:.0%} of the first rows are rejected, {reason['num']} of "
            f"{rejects['num']} by: {reason['reason']}; correct {job} before you build"
        )
    return {
        "job": str(job),
        "source": plan.source.name,
        "sides": [side.source.name for side in plan.sides],
        "session": plan.session[0],
        "time": plan.time[0],
        "label": None if plan.label is None else plan.label.column.name,
        "evaluation_from": None if split is None else split.isoformat(),
        "columns": {f.column.name: f.role for f in plan.features},
        "left_out": [what for what, _ in plan.left_out],
        "num_samples": previewed["num_samples"],
        "num_rejects": rejects["num"],
        "notes": previewed["notes"],
    }


def _make_plan(folder: Folder, sources: Sequence[LogSource]) -> JobPlan:
    """Return the choices for some sources, of which possible keys are checked for uniqueness."""
    sources = [typed(source) for source in sources]
    unique = {
        (source.name, column): is_unique(folder, source, column)
        for source in (sources if len(sources) > 1 else [])
        for column in source.rows.column_names
        if pa.types.is_integer(source.rows[column].type) or is_text(source.rows[column].type)
    }
    return plan_of(sources, unique)


def _dropped_columns(sources: Sequence[LogSource]) -> Iterator[tuple[str, str]]:
    """Yield (column, reason) of columns that sources cannot declare."""
    for source in sources:
        declared = source.config.columns or source.rows.column_names
        for path, note in source.notes.items():
            if path.split(".")[0] not in declared:
                yield f"{path} of {source.name}", note


def _summary(plan: JobPlan) -> list[str]:
    label = plan.label
    lines = [
        f"samples: of {plan.source.name} ({plan.source.config.files}, {plan.source.config.format})",
        f"session: {plan.session[0]} ({plan.session[1]})",
        f"time: {plan.time[0]} ({plan.time[1]})",
        f"label: {label.column.name} ({label.why})" if label else "label: none found",
    ]
    lines += [f"side table: {side.source.name} by {side.asked} ({side.why})" for side in plan.sides]
    lines += [f"not used: {what} ({why})" for what, why in plan.left_out]
    return lines


# Texts of the job file and the schema.


def job_text(plan: JobPlan, name: str, folder: str, split: datetime | None) -> str:
    """Return the text of `job.yaml`.

    `folder` is that of the files, `split` the start of the evaluation range, None if it is unknown.
    """
    lines = [
        f"# A first job for the files in {folder}, written by `presage init`.",
        "# Each choice has its reason as a comment: correct it where it is wrong, then check with",
        "#     presage preview JOB --input DIR",
        "# docs/job_reference.md lists the keys; schema.pbtxt has the roles of columns.",
        *_left_out(plan),
        f"name: {yaml_word(name)}",
        "data:",
        "  sources:",
        *_source(plan.source, "    "),
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
        f"  session: {{key: {yaml_word(key)}, time: {yaml_word(plan.time[0])}{gap}}}",
        *_split(plan, split),
        "  # The build chooses dedup groups from a sample of whole sessions; job.yaml of the",
        "  # dataset names them. To choose them yourself: groups: {user: [user_id, age]}",
        "  groups: auto",
        *_transforms(plan),
    ]
    if plan.tables:
        lines += [
            "  # Embedding tables. Features with values of the same kind share one. num_rows is",
            "  # large enough that hashed values seldom collide; no vocabulary is needed.",
            "  tables:",
            *_tables(plan),
        ]
    else:
        lines += ["  tables: {}  # no column holds ids"]
    if plan.label is not None and plan.tables:
        lines += _training(plan)
    elif plan.label is None:
        lines += [
            "# No column is a label: the dataset can be built, but no model can be trained on it.",
            '# Add one in SQL (0 or 1) and tag it "label" in schema.pbtxt.',
        ]
    return "\n".join(lines) + "\n"


def _transforms(plan: JobPlan) -> Iterator[str]:
    if plan.transforms:
        yield "  # Features made of columns; schema.pbtxt has the reasons."
        yield "  transforms:"
        yield "    samples:"
    for name, text in plan.transforms.items():
        yield f"      {yaml_word(name)}: {text if text[0] == '{' else json.dumps(text)}"


def _training(plan: JobPlan) -> Iterator[str]:
    batch = min(4096, max(64, 1 << max(1, plan.num_samples // 50).bit_length() - 1))
    yield from _comment(
        f"For about {plan.num_samples} samples: at least 50 steps of at most 4,096.", "  "
    )
    yield f"  block_samples: {min(1024, batch)}"
    yield f"  oracle: {{batch_samples: {batch}}}  # as in train:"
    yield "# A small model; docs/job_reference.md lists others, and optimizers."
    yield "train:"
    yield "  model: {name: dlrm, bottom_layers: [64], top_layers: [128, 64]}"
    yield "  embedding_dim: 16"
    yield f"  batch_samples: {batch}"
    yield "  epochs: 1"


def _left_out(plan: JobPlan) -> Iterator[str]:
    for what, why in plan.left_out:
        yield from _comment(f"Not used: {what}: {why}.", "")


def _source(source: LogSource, indent: str) -> Iterator[str]:
    yield from _comment(
        f"{pluralize(len(source.files), 'file')}, {source.num_bytes / 1e6:.1f} MB; "
        "types from the first rows.",
        indent,
    )
    yield f"{indent}{source.name}:"
    yield from _config(source, indent + "  ")


def _config(source: LogSource, indent: str) -> Iterator[str]:
    config = source.config
    yield f"{indent}files: {json.dumps(config.files)}"
    yield f"{indent}format: {config.format}"
    if config.format == "csv":
        if config.delimiter != ",":
            yield f"{indent}delimiter: {json.dumps(config.delimiter)}"
        if config.quote is None:
            yield f"{indent}quote: null  # quotes are plain text"
        if config.escape is not None:
            yield f"{indent}escape: {json.dumps(config.escape)}"
        if not config.header:
            yield f"{indent}header: false  # the first line is a row: rename c0, c1, ..."
    if config.columns:
        yield f"{indent}columns:"
        for name, word in config.columns.items():
            for path, note in source.notes.items():
                if path.split(".")[0] == name:
                    yield from _comment(f"{path}: {note}.", f"{indent}  ")
            yield f"{indent}  {yaml_word(name)}: {yaml_word(word)}"
    if config.partitions:
        names = ", ".join(f"{yaml_word(name)}: {word}" for name, word in config.partitions.items())
        yield f"{indent}partitions: {{{names}}}  # of folder names"


def _sides(sides: Sequence[Side]) -> Iterator[str]:
    for side in sides:
        yield from _comment(f"{side.why}; {_keys(side)}.", "    ")
        yield f"    {side.source.name}:"
        yield f"      key: {yaml_word(side.key)}"
        if side.time is not None:
            yield f"      time: {yaml_word(side.time)}"
        yield from _config(side.source, "      ")


def _keys(side: Side) -> str:
    if side.time is not None:
        return f"several rows per key, each valid from its {side.time}"
    scope = "" if side.source.is_whole else " among the first rows"
    return (
        f"each {side.key} is unique{scope}. Values may be newer than a sample: drop columns that "
        "leak the label"
    )


def _join(side: Side) -> str:
    key = "" if side.asked == side.key else f"key: {yaml_word(side.asked)}, "
    same = all(new == old for new, old in side.columns.items())
    names = ", ".join(map(yaml_word, side.columns))
    pairs = ", ".join(f"{yaml_word(new)}: {yaml_word(old)}" for new, old in side.columns.items())
    columns = f"[{names}]" if same else f"{{{pairs}}}"
    return f"{{side: {side.source.name}, {key}columns: {columns}}}"


def _statement(plan: JobPlan) -> Iterator[str]:
    looked_up = {name for side in plan.sides for name in side.columns}
    elsewhere = looked_up | plan.transforms.keys()
    columns = [f.column for f in plan.features if f.column.name not in elsewhere]
    if plan.unnested is not None:
        yield f"    # One sample for each entry of {plan.unnested}, which has the label."
    yield from _comment(
        "One SELECT over the rows of the source; a row on which it fails is rejected.", "    "
    )
    yield "    map: |"
    for index, column in enumerate(columns):
        same = column.expr == quoted(column.name)
        text = column.expr if same else f"{column.expr} AS {quoted(column.name)}"
        comma = "," if index + 1 < len(columns) else ""
        yield f"      {'SELECT ' if not index else '       '}{text}{comma}"
    yield f"      FROM {plan.inner}"


def _split(plan: JobPlan, split: datetime | None) -> Iterator[str]:
    if split is not None:
        yield "  # About the last tenth of the rows is for evaluation."
        yield f"  split: {{evaluation_from: {split}}}"
    elif plan.is_timed:
        yield "  # All samples are for training; to hold back the last ones:"
        yield "  # split: {evaluation_from: 2026-01-31}"


def num_rows_of(features: Sequence[PlannedFeature], scale: float) -> int:
    """Return the number of rows of a table, a power of two large enough that hashes seldom collide.

    64 for each of a few hundred values (one in 128 shares its row), down to four for each of many.

    `scale` is rows of the log per row examined.
    """
    distinct = sum(f.column.num_distinct for f in features)
    values = max(1, sum(len(f.column.values) for f in features))
    expected = distinct * (scale if distinct > 0.1 * values else 1.0)
    num_rows = max(4 * expected, min(64 * expected, _MANY_ROWS), _FEW_ROWS)
    return min(_MAX_TABLE, 1 << int(num_rows - 1).bit_length())


def _tables(plan: JobPlan) -> Iterator[str]:
    scale = max(1.0, plan.source.num_rows / plan.source.rows.num_rows)
    for name, features in plan.tables.items():
        names = ", ".join(yaml_word(f.column.name) for f in features)
        size = num_rows_of(features, scale)
        yield f"    {yaml_word(name)}: {{features: [{names}], num_rows: {size}}}"


def schema_text(plan: JobPlan) -> str:
    """Return the text of `schema.pbtxt`."""
    lines = [
        "# Columns of the samples, each with its role: sparse (an id, looked up in a table),",
        "# dense (a number that a model reads), label, weight, label_time, or kept (stored, read",
        "# by no model). docs/job.md documents them.",
    ]
    for feature in plan.features:
        lines += [*_comment(feature.why, ""), _feature(feature)]
    return "\n".join(lines) + "\n"


def _feature(feature: PlannedFeature) -> str:
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


# Figures that need more than the first rows.

MAX_BYTES = 2 << 30
"""Files of one source are read whole for a figure if they have at most so many bytes."""
_WINDOWS = 100
"""Number of windows in the files of a source whose rows determine the split."""
_WINDOW_BYTES = 32 << 10
_COMPRESSION = 8
"""Estimated compression ratio of texts."""
_TYPED = ("int64", "uint64", "float64", "timestamp")
"""Types of columns that DuckDB reads as such, all others as texts."""


def _query(folder: Folder, source: LogSource, expr: str) -> list[tuple[object, ...]]:
    """Return the rows of an aggregate over all files; empty if they cannot be queried."""
    relation = _RELATIONS.get(source.config.format)
    if not folder.is_local or relation is None or source.num_bytes > MAX_BYTES:
        return []
    rows = relation([str(Path(folder.root, file.path)) for file in source.files], source.config)
    try:
        with duckdb.connect() as connection:
            return connection.sql(f"SELECT {expr} FROM {rows} AS {source.name}").fetchall()
    except duckdb.Error:
        return []


def _read_parquet(paths: list[str], _: SourceConfig) -> str:
    return f"read_parquet({paths}, union_by_name = true)"


def _read_json(paths: list[str], config: SourceConfig) -> str:
    options = "format = 'newline_delimited', ignore_errors = true"
    return f"read_json({paths}, {options}, columns = {_duckdb_columns(config)})"


def _read_csv(paths: list[str], config: SourceConfig) -> str:
    quote, escape = _text(config.quote or ""), _text(config.escape or config.quote or "")
    return (
        f"read_csv({paths}, auto_detect = false, delim = {_text(config.delimiter)}, "
        f"quote = {quote}, escape = {escape}, header = {config.header}, "
        f"columns = {_duckdb_columns(config)}, ignore_errors = true, null_padding = true)"
    )


def _duckdb_columns(config: SourceConfig) -> str:
    types = {
        name: sql_type(arrow_type(kind)) if kind in _TYPED else "VARCHAR"
        for name, kind in (config.columns or {}).items()
    }
    return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in types.items()) + "}"


_RELATIONS = {"parquet": _read_parquet, "jsonl": _read_json, "csv": _read_csv}
"""Table functions of DuckDB by format; files of other formats are not queried."""


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def is_unique(folder: Folder, source: LogSource, column: str) -> bool:
    """Tell whether the values of a column are distinct, by all rows if they can be queried."""
    values = one_chunk(source.rows[column]).drop_null()
    if len(pc.unique(values)) < len(values):
        return False
    if source.is_whole:
        return True
    name = quoted_name(column)
    counts = _query(folder, source, f"count({name}), count(DISTINCT {name})")
    return not counts or counts[0][0] == counts[0][1]


def evaluation_from(
    folder: Folder, source: LogSource, expr: str, scratch: Path, progress: Callable[[str], None]
) -> datetime | None:
    """Return a time with about a tenth of the rows after it; None if it cannot be determined.

    Rows are read from windows at equal distances, to represent all of the files.

    `expr` is the SQL of the time, `scratch` a directory for copies of the windows; a file that
    cannot be read to its end is a warning.
    """
    figures = f"quantile_disc(TRY({expr}), 0.9), min(TRY({expr})), max(TRY({expr}))"
    is_text = format_of(source.config).is_text
    if not is_text and source.config.format in _RELATIONS and not source.is_whole:
        result = _query(folder, source, figures)
    else:
        rows = source.rows if source.is_whole else _spread_rows(folder, source, scratch, progress)
        with duckdb.connect() as connection:
            connection.register(source.name, rows)
            try:
                result = connection.sql(
                    f"SELECT {figures} FROM {quoted_name(source.name)}"
                ).fetchall()
            except duckdb.Error:  # the time is in a list that only the job unnests
                result = []
    if not result or result[0][0] is None:
        return None
    return _rounded(*(_datetime(value) for value in result[0]))


def _spread_rows(
    folder: Folder, source: LogSource, scratch: Path, progress: Callable[[str], None]
) -> pa.Table:
    """Return rows from windows at equal distances in all files of a source."""
    config = replace(source.config, header=False)  # a window starts anywhere in its file
    tables: list[pa.Table] = []
    step = source.num_bytes // _WINDOWS + 1
    for file in source.files[:: len(source.files) // _WINDOWS + 1]:
        split_folder, rejects = folder, list[Reject]()
        if format_of(config).is_text:
            split_folder, splits = (
                folder_of(scratch),
                _windows(folder, file.path, source, scratch, step),
            )
        else:
            whole = InputSplit(source.name, file.path, 0)
            splits, rejects = input_splits(folder, whole, config, step)
        for split in splits:
            schema = empty_rows(split_folder, source.name, config, [split.path]).schema
            for rows in read_split(split_folder, split, config, schema):
                rejects.extend(rows.rejects)
                if rows.table is not None:
                    tables.append(rows.table)
                    break
        for reject in rejects:
            if reject.rows_unknown:
                progress(f"WARNING: {reject.file}: {reject.reason}; a build would stop there")
    return pa.concat_tables(tables, promote_options="permissive") if tables else source.rows


def _windows(
    folder: Folder, path: str, source: LogSource, scratch: Path, step: int
) -> Iterator[InputSplit]:
    """Copy whole lines of a text from windows at equal distances, each to its own file."""
    with folder.open(path) as stored, closing(decompressed(stored)) as file:
        is_plain = file is stored
        step = max(step, _WINDOW_BYTES) * (1 if is_plain else _COMPRESSION)
        for number in range(_WINDOWS * _COMPRESSION):
            if is_plain:
                file.seek(number * step)
            block = file.read(_WINDOW_BYTES)
            begins_with_row = not number and not (
                source.config.format == "csv" and source.config.header
            )
            start = 0 if begins_with_row else block.find(b"\n") + 1
            lines = block[start : block.rfind(b"\n") + 1]
            copy = Path(scratch, path).with_name(f"window-{number}")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(lines)
            if lines:
                yield InputSplit(source.name, str(copy.relative_to(scratch)), 0)
            if len(block) < _WINDOW_BYTES:
                return
            if not is_plain:
                file.read(step - _WINDOW_BYTES)


def _datetime(value: object) -> datetime:
    if isinstance(value, datetime):
        return value.replace(tzinfo=None)
    return datetime.fromisoformat(str(value))  # a date


def _rounded(middle: datetime, low: datetime, high: datetime) -> datetime | None:
    """Return a round time near the middle with samples before and after it."""
    epoch = datetime(1970, 1, 1)
    for step in (timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)):
        rounded = epoch + (middle - epoch) // step * step
        if high - low >= 20 * step and low < rounded <= high:
            return rounded
    return middle if low < middle <= high else None
