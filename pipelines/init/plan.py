"""Choices of a first job: the sample source, label, session, side tables, transforms and tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from presage.pipelines.init.columns import (
    BECOME_NULL,
    TEXTS,
    Role,
    ScannedColumn,
    columns_of,
    numbers_in,
    quoted,
    type_of,
    words_of,
)
from presage.pipelines.init.sample_sources import LogSource
from presage.schemas.arrays import is_text, one_chunk
from presage.schemas.errors import SchemaError

_LABELS = (
    "label", "target", "clicked", "click", "is_click", "purchased", "purchase", "converted",
    "conversion", "bought", "liked", "like", "is_like", "y",
)  # fmt: skip
_SESSIONS = ({"session", "visit"}, {"user", "uid", "member", "customer", "client", "person"},
             {"device", "cookie", "account", "visitor", "profile"})  # fmt: skip
_TIMES = {"time", "timestamp", "ts", "datetime", "at", "event"}
_NOT_NOUNS = {"id", "ids", "fixed", "inview", "list", "seq", "history", "of", "the", "last"}
_OVERLAP = {"int": 0.5, "text": 0.05}
"""Share of values that two columns must have in common to hold ids of the same kind, by shape:
integers may be equal by chance."""
_CHANCE = 5
"""The least share of common integers, in terms of that by chance: the share of its range that a
column has."""
_FEW = {"int": 100, "text": 20}
"""Least number of distinct values for common values to be significant."""
_SMALL = 10
"""Columns of numbers up to it are read unchanged, others as logarithms or normalized."""
_EARLY_ROWS = 1000
"""A column that is nearly all null in so many first rows cannot be normalized by them."""


@dataclass(frozen=True, slots=True)
class PlannedFeature:
    """A column of the samples, its role, and the reason."""

    column: ScannedColumn
    role: Role
    why: str


@dataclass(frozen=True, slots=True)
class Side:
    """A side table.

    `key` is its key column, `asked` that of the samples; `columns` is new name to column; `time`
    has the start of a row's validity, None if keys are unique.
    """

    source: LogSource
    key: str
    asked: str
    columns: Mapping[str, str]
    time: str | None
    why: str


@dataclass(slots=True)
class JobPlan:
    """The choices of a job.

    Attributes:
        source: files that samples are made of.
        inner: relation in the FROM clause: the source, or a subquery that unnests a list.
        num_samples: estimated number of samples.
        features: columns of the samples.
        session: (column, reason).
        time: (column, reason).
        is_timed: False if no column is a time and a constant replaces it.
        has_gap: whether a pause ends a session.
        sides: side tables.
        unnested: list of objects of which each becomes a sample.
        transforms: new column to transform.
        tables: name to features.
        left_out: (column or file, reason) of everything that is not used.
    """

    source: LogSource
    inner: str
    num_samples: int
    features: list[PlannedFeature] = field(default_factory=list[PlannedFeature])
    session: tuple[str, str] = ("", "")
    time: tuple[str, str] = ("", "")
    is_timed: bool = True
    has_gap: bool = False
    sides: list[Side] = field(default_factory=list[Side])
    unnested: str | None = None
    transforms: dict[str, str] = field(default_factory=dict[str, str])
    tables: dict[str, list[PlannedFeature]] = field(default_factory=dict[str, list[PlannedFeature]])
    left_out: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    @property
    def label(self) -> PlannedFeature | None:
        """The label, or None."""
        return next((f for f in self.features if f.role == "label"), None)


def typed(source: LogSource) -> LogSource:
    """Return a source with the columns of numbers of its CSV files declared as numbers."""
    if source.config.format != "csv":
        return source
    rows, types = source.rows, dict(source.config.columns or {})
    for index, name in enumerate(rows.column_names):
        parsed = numbers_in(one_chunk(rows[name]))
        if parsed is not None and not len(parsed[2]):
            shape, numbers, _ = parsed
            types[name] = f"{shape}64"
            rows = rows.set_column(index, name, numbers)
    return replace(source, rows=rows, config=replace(source.config, columns=types))


def plan_of(sources: Sequence[LogSource], unique: Mapping[tuple[str, str], bool]) -> JobPlan:
    """Return a job for some sources.

    `sources` have typed columns; `unique` is (source, column) to whether the values are distinct.
    """
    if not sources:
        raise SchemaError("files of the folder have no row; fill one")
    analyzed = {source.name: list(columns_of(source.rows)) for source in sources}
    columns = {n: [c for c in each if isinstance(c, ScannedColumn)] for n, each in analyzed.items()}
    labelled_lists = {source.name: _labelled_list(source) for source in sources}

    def evidence(source: LogSource) -> tuple[int, int, str]:
        own = columns[source.name]
        shown = any(c.shown for c in own) or _clicked_of(source, own) or labelled_lists[source.name]
        label = _named_label(own) is not None
        timed = any(c.shape == "time" for c in own)
        return 3 * bool(shown) + 2 * label + 2 * timed, source.num_bytes, source.name

    source = max(sources, key=evidence)
    plan = JobPlan(source, quoted(source.name), source.num_rows)
    log_columns, name = analyzed[source.name], labelled_lists[source.name]
    if name is not None:
        plan.source = source = _with_entries(source, name)
        plan.num_samples, plan.unnested = source.num_rows, name
        plan.inner = _unnest("* REPLACE (", quoted(name), f"{quoted(name)})", plan.inner)
        log_columns = list(columns_of(source.rows))
    plan.left_out += [
        (f"column {c[0]}", c[1]) for c in log_columns if not isinstance(c, ScannedColumn)
    ]
    others = _with_label(plan, source, [c for c in log_columns if isinstance(c, ScannedColumn)])
    _choose_time(plan, others)
    _choose_session(plan)
    for other in sorted(sources, key=lambda k: (k.config.format == "csv", -k.num_bytes)):
        if other.name != source.name:
            _add_side(plan, other, columns[other.name], unique)
    keys = {plan.session[0], plan.time[0], plan.label and plan.label.column.name}
    plan.features = [_rejecting(f) if f.column.name in keys else f for f in plan.features]
    _scale(plan)
    plan.tables = _tables(plan)
    return plan


def _unnest(before: str, expr: str, name: str, source: str) -> str:
    return f"(SELECT {before}unnest({expr}) AS {name}\n            FROM {source})"


def _labelled_list(source: LogSource) -> str | None:
    """Return the name of a list of objects with a label among their fields, or None."""
    for name in source.rows.column_names:
        values = one_chunk(source.rows[name])
        listed = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
        if listed and pa.types.is_struct(values.type.value_type):
            entries = columns_of(pa.table({name: values.flatten()}))
            fields = [c for c in entries if isinstance(c, ScannedColumn)]
            if _named_label(fields) or _graded_label(fields):
                return name
    return None


def _with_entries(source: LogSource, name: str) -> LogSource:
    """Return a source with one row for each entry of a list."""
    lists = one_chunk(source.rows[name])
    rows = source.rows.take(pc.list_parent_indices(lists))
    rows = rows.set_column(rows.column_names.index(name), name, lists.flatten())
    return replace(source, rows=rows, num_rows=source.num_rows * rows.num_rows // len(lists))


def _rejecting(feature: PlannedFeature) -> PlannedFeature:
    """Return a feature whose bad values reject their rows: a key, time or label."""
    column = feature.column
    expr = column.expr.replace("TRY_CAST(", "CAST(")
    why = column.why.replace(BECOME_NULL, "these reject their rows")
    return replace(feature, column=replace(column, expr=expr, why=why))


def _named_label(columns: Sequence[ScannedColumn]) -> ScannedColumn | None:
    binary = {c.name: c for c in columns if c.is_binary}
    exact = [binary[name] for name in _LABELS if name in binary]
    partial = [c for name in _LABELS[:6] for c in binary.values() if name in c.words]
    return next(iter([*exact, *partial]), None)


def _graded_label(columns: Sequence[ScannedColumn]) -> tuple[ScannedColumn, float] | None:
    """Return a numeric outcome, such as seconds, and the bound above which it is positive."""
    for column in columns:
        if column.is_outcome and column.shape in ("int", "float") and not column.is_binary:
            values = pc.fill_null(column.values, 0)
            for bound in (0, pc.quantile(values, 0.5, interpolation="lower")[0].as_py()):
                if 0.01 < pc.mean(pc.greater(values, bound)).as_py() < 0.99:
                    return column, bound
    return None


def _clicked_of(
    source: LogSource, columns: Sequence[ScannedColumn]
) -> tuple[ScannedColumn, ScannedColumn] | None:
    """Return a list of the items shown, and the list, or the one, of these that was clicked."""
    items = [c for c in columns if not c.shown and (c.of or c.shape) in ("int", "text")]
    with duckdb.connect() as database:
        database.register("log", source.rows.slice(0, TEXTS))
        values = {
            c.name: [row for (row,) in database.sql(f"SELECT {c.expr} FROM log").fetchall()]
            for c in items
            if c.num_distinct > 2
        }
    for shown in (c for c in items if c.shape == "list" and c.name in values):
        for clicked in (c for c in items if c.name in values and c is not shown):
            if (clicked.of or clicked.shape) != shown.of or len(clicked.values) >= len(
                shown.values
            ):
                continue
            one = clicked.shape != "list"
            pairs = zip(values[shown.name], values[clicked.name], strict=True)
            both = [(a, [b] if one else b) for a, b in pairs if a and b not in (None, [])]
            of_these = sum(set(b) <= set(a) for a, b in both)
            last = sum(b[0] in (a[0], a[-1]) for a, b in both) if one else 0  # it is a history
            if both and of_these >= 0.95 * len(both) and last < 0.95 * len(both):
                return shown, clicked
    return None


def _raw_name(source: LogSource, column: ScannedColumn) -> str:
    return next(n for n in source.rows.column_names if quoted(n) == column.expr)


def _with_label(
    plan: JobPlan, source: LogSource, columns: list[ScannedColumn]
) -> list[ScannedColumn]:
    """Add the label, and the SQL that unnests the list with it; return the remaining columns."""
    names = {c.name for c in columns}
    item = next(n for n in ("item", "shown_item", "item_") if n not in names)
    name = "label" if "label" not in names else "label_"
    pairs = next((c for c in columns if c.shown), None)
    both = _clicked_of(source, columns)
    named, graded = _named_label(columns), _graded_label(columns)
    if both is not None and both[1].shape != "list" and named is not None:
        both = None  # each row is a shown item, and has its slate
    used, shown, entry, sql = set[str](), None, item, item
    if pairs is not None:
        used, shown, entry = {pairs.name}, pairs, "pair_"
        sql = f"regexp_replace({entry}, '-[01]$', '')"
        sql = f"CAST({sql} AS BIGINT)" if pairs.of == "int" else sql
        label, why = "right(pair_, 1)", f"the 0 or 1 of each entry of {pairs.name}"
    elif both is not None:
        used, shown = {c.name for c in both}, both[0]
        one = both[1].shape != "list"
        chosen = f"{both[1].expr} = {item}" if one else f"list_contains({both[1].expr}, {item})"
        label = f"coalesce({chosen}, false)"
        why = f"whether {both[1].name} {'is' if one else 'has'} the entry of {shown.name}"
    elif named is not None and not named.values.null_count:
        _add(plan, named, "label", "0 or 1 in every row, and by its name")
        return [c for c in columns if c is not named]
    elif named is not None:
        used, name, why = {named.name}, named.name, f"by its name{_nulls(named)}"
        label = f"coalesce({named.expr}, {'false' if named.shape == 'bool' else '0'})"
    elif graded is not None:
        column, bound = graded
        label = f"coalesce({column.expr}, 0) > {bound}"
        why = f"whether {column.name} is above {bound}{_nulls(column)}"
    else:
        return columns
    if shown is not None:
        plan.inner = _unnest("*, ", shown.expr, entry, plan.inner)
        num_rows = min(shown.num_rows, TEXTS) if shown.shown else shown.num_rows
        plan.num_samples = plan.num_samples * len(shown.values) // num_rows
        items = ScannedColumn(item, sql, shown.of or "int", shown.values, 0, why=shown.name)
        _add(plan, items, "sparse", f"one sample for each entry of {shown.name}")
    label_column = ScannedColumn(name, f"CAST({label} AS TINYINT)", "int", pa.array([0, 1]), 0)
    _add(plan, label_column, "label", why)
    return [c for c in columns if c.name not in used]


def _nulls(column: ScannedColumn) -> str:
    share = column.num_nulls / max(1, column.num_rows)
    return f"; null in {share:.1%} of the rows, taken as 0" if column.num_nulls else ""


def _add(plan: JobPlan, column: ScannedColumn, role: Role, why: str) -> None:
    plan.features.append(PlannedFeature(column, role, why))


def _role(column: ScannedColumn, *, in_side: bool = False) -> tuple[Role, str]:
    """Return the role of a column, and the reason."""
    distinct = column.num_distinct
    if column.shape == "time":
        return "kept", f"a time ({column.why})"
    if column.is_outcome and not in_side:
        return "kept", "by its name known only after the sample: a model must not read it"
    if column.shape == "list":
        if column.is_times:
            return "kept", f"{column.why}; a list of integers that look like times"
        if column.of == "float" or column.is_amounts:
            return "kept", f"{column.why}; a list of numbers that are no ids"
        return "sparse", f"{column.why}, {distinct} distinct values"
    if distinct <= 1:
        return "kept", "the same value in all of the first rows"
    if column.is_times:
        return "kept", "integers that look like times since 1970; make a time of them in SQL"
    if column.is_prose:
        return "kept", "a long text; make features of it in SQL"
    if column.is_row_id:
        return "kept", "a different value in nearly every row: no value can be learned"
    if column.shape in ("float", "bool"):
        return "dense", column.why or ("a number" if column.shape == "float" else "true or false")
    if column.is_id:
        values = "texts" if column.shape == "text" else column.why or "numbers"
        return "sparse", f"{distinct} distinct {values}"
    return "dense", column.why or "a number, by its name or its range"


def _choose_time(plan: JobPlan, columns: Sequence[ScannedColumn]) -> None:
    """Choose the time column, and add all columns with their roles."""
    times = [c for c in columns if c.shape == "time"]
    times.sort(key=lambda c: (c.num_nulls > 0, not c.words & _TIMES, -c.num_distinct))
    if times:
        plan.time = times[0].name, f"{times[0].why}; {times[0].num_distinct} distinct"
    else:
        names = {c.name for c in columns}
        name = next(n for n in ("row_time", "row_time_") if n not in names)
        constant = ScannedColumn(name, "CAST(0 AS BIGINT)", "int", pa.array([0]), 0)
        why = "no column is a time: samples of a session keep the order of the files"
        _add(plan, constant, "kept", why)
        plan.time, plan.is_timed = (name, why), False
    for column in columns:
        _add(plan, column, *_role(column))


def _choose_session(plan: JobPlan) -> None:
    """Choose the session key."""
    scalars = [f.column for f in plan.features if f.role != "label" and f.column.num_rows]
    scalars = [c for c in scalars if c.shape in ("int", "text") and c.is_id and c.num_distinct > 1]
    candidates = [c for c in scalars if not (c.is_outcome or c.is_prose)]
    repeating = [c for c in candidates if c.num_distinct < c.num_rows and not c.num_nulls]
    for index, words in enumerate(_SESSIONS):
        named = [c for c in candidates if c.words & words]
        if named:
            key = max(
                named,
                key=lambda c: (not c.num_nulls, bool(c.words & {"id", "key"}), c.num_distinct),
            )
            plan.session = key.name, _session_why(key, "by its name")
            plan.has_gap = index > 0 and plan.is_timed
            if not index:
                _set_role(plan, key, "kept", "a session id: no value can be learned")
            return
    if repeating:
        key = max(repeating, key=lambda c: c.num_distinct)
        why = "no name means session or user; the repeating column with most values"
        plan.session, plan.has_gap = (key.name, _session_why(key, why)), plan.is_timed
        _set_role(plan, key, "sparse", "the session key; may be a user id")
    elif candidates:
        why = "no value of any column repeats: each row is a session"
        plan.session = candidates[0].name, why
    else:
        why = "no column looks like a session or a user: all rows are one session; name a key"
        plan.session = "all_rows", why
        _add(
            plan,
            ScannedColumn("all_rows", "CAST(0 AS BIGINT)", "int", pa.array([0]), 0),
            "kept",
            why,
        )


def _set_role(plan: JobPlan, column: ScannedColumn, role: Role, why: str) -> None:
    for index, feature in enumerate(plan.features):
        if feature.column is column:
            plan.features[index] = PlannedFeature(column, role, why)


def _session_why(key: ScannedColumn, why: str) -> str:
    nulls = f", {key.num_nulls} rows with null are rejected" if key.num_nulls else ""
    return f"{why}; {key.num_rows / max(1, key.num_distinct):.1f} rows per value{nulls}"


def _add_side(
    plan: JobPlan,
    source: LogSource,
    columns: Sequence[ScannedColumn],
    unique: Mapping[tuple[str, str], bool],
) -> None:
    """Add files as a side table, if samples have a key of them."""
    match = _key_of(plan, source, columns)
    label = f"{source.name} ({source.config.files})"
    if match is None:
        plan.left_out.append((label, "no column has values in common with the samples"))
        return
    key, asked, why = match
    key_name = _raw_name(source, key)
    time = None
    if key.num_nulls == key.num_rows or not unique.get((source.name, key_name), False):
        times = [c for c in columns if c.shape == "time" and c.expr == quoted(c.name)]
        if not times:
            reason = f"several rows per {key_name}, and no time for the validity of each"
            plan.left_out.append((label, f"{reason}; see samples.per and samples.events"))
            return
        time = _raw_name(source, times[0])
    others = [c for c in columns if c is not key and (time is None or c.expr != quoted(time))]
    used, unused = _side_columns(plan, source, others)
    if not used:
        plan.left_out.append((label, "has no further columns that samples can use"))
        return
    for feature in used.values():
        _add(plan, feature.column, feature.role, f"from {source.name}; {feature.why}")
    for reason, column_names in unused.items():
        plan.left_out.append((f"{source.name}: {', '.join(column_names)}", reason))
    raw_names = {name: _raw_name(source, feature.column) for name, feature in used.items()}
    plan.sides.append(Side(source, key_name, asked, raw_names, time, why))


def _side_columns(
    plan: JobPlan, source: LogSource, columns: Sequence[ScannedColumn]
) -> tuple[dict[str, PlannedFeature], dict[str, list[str]]]:
    """Return the columns of a side table that samples can use, and the others by reason."""
    names = {f.column.name for f in plan.features}
    plain = {quoted(name) for name in source.rows.column_names}
    used: dict[str, PlannedFeature] = {}
    unused: dict[str, list[str]] = {}
    for column in columns:
        if column.name in names:
            reason = "samples have columns with these names"
        elif column.is_prose:
            reason = "long texts"
        elif column.expr in plain:
            used[column.name] = PlannedFeature(column, *_role(column, in_side=True))
            continue
        else:
            raw = _transformed(plan, source, column, names)
            if raw is not None:
                used[column.name] = PlannedFeature(raw, "kept", "a transform makes a feature of it")
                continue
            reason = f"{column.why or column.shape}: features of them need SQL"
        unused.setdefault(reason, []).append(column.name)
    return used, unused


def _transformed(
    plan: JobPlan, source: LogSource, column: ScannedColumn, names: set[str]
) -> ScannedColumn | None:
    """Add a transform with the SQL of a side table's column; return the raw column."""
    if column.shape not in ("int", "list") or column.name not in source.rows.column_names:
        return None
    name = f"{column.name}_{'list' if column.shape == 'list' else 'code'}"
    values = one_chunk(source.rows[column.name])
    if name in names or not (is_text(values.type) or pa.types.is_floating(values.type)):
        return None
    role, why = _role(column, in_side=True)
    plan.transforms[name] = column.expr
    _add(plan, replace(column, name=name), role, f"from {column.name} of {source.name}; {why}")
    shape = "text" if is_text(values.type) else "float"
    return ScannedColumn(
        column.name, quoted(column.name), shape, values, len(values), values.null_count
    )


def _scale(plan: JobPlan) -> None:
    """Add transforms that scale numbers of a wide range; the numbers themselves are kept."""
    for index, feature in enumerate(list(plan.features)):
        column = feature.column
        values = column.values.drop_null()
        if feature.role != "dense" or column.shape == "bool" or not len(values):
            continue
        low, middle, high = pc.quantile(values, [0, 0.5, 1]).to_pylist()
        if low >= -_SMALL and high <= _SMALL:
            continue
        values_range = f"{low:g} to {high:g}, median {middle:g}"
        late = len(column.values.slice(0, _EARLY_ROWS).drop_null()) < 0.1 * _EARLY_ROWS
        wide = column.is_wide or (late and len(column.values) > _EARLY_ROWS and low >= 0)
        transform, suffix = ("log", "log") if wide else ("normalize", "scaled")
        name = f"{column.name}_{suffix}"
        name += "_" * any(f.column.name == name for f in plan.features)
        plan.transforms[name] = f"{{{transform}: {{column: {column.name}}}}}"
        plan.features[index] = PlannedFeature(
            column, "kept", f"{feature.why}; {name} is read instead"
        )
        scaled = ScannedColumn(name, "", "float", values, column.num_rows)
        why = f"{feature.why}; {values_range}: {transform} of {column.name}"
        _add(plan, scaled, "dense", why)


def _key_of(
    plan: JobPlan, source: LogSource, columns: Sequence[ScannedColumn]
) -> tuple[ScannedColumn, str, str] | None:
    """Return the key of a side table, the column of samples that has it, and the reason."""
    scalars = [f.column for f in plan.features if f.column.shape in ("int", "text")]
    plain = {quoted(n) for n in source.rows.column_names}
    keys = [c for c in columns if c.shape in ("int", "text") and c.expr in plain]
    named = [
        (key, sample_column)
        for key in keys
        for sample_column in scalars
        if key.name == sample_column.name and key.shape == sample_column.shape and key.is_id
        and key.num_distinct > 0.5 * key.num_rows
    ]  # fmt: skip
    if named:
        key, sample_column = max(named, key=lambda pair: pair[0].num_distinct / pair[0].num_rows)
        return key, sample_column.name, f"both have a column {sample_column.name!r}"
    for key in keys:
        if (
            key.shape != "text"
            or key.is_prose
            or key.num_distinct < max(_FEW["text"], 0.99 * key.num_rows)
        ):
            continue
        for sample_column in scalars:
            share = _share(sample_column, key)
            enough = share >= _OVERLAP["text"] and sample_column.num_distinct >= _FEW["text"]
            if sample_column.shape == "text" and enough:
                values = f"{share:.0%} of the values of {sample_column.name!r}"
                return key, sample_column.name, f"{values} occur in its first {key.name!r}"
    return None


def _share(column: ScannedColumn, other: ScannedColumn) -> float:
    """Return the share of a column's distinct values that occur in another column."""
    values = pc.unique(column.values.drop_null())
    if not len(values) or values.type != other.values.type:
        return 0.0
    common = pc.sum(pc.is_in(values, value_set=pc.unique(other.values.drop_null()))).as_py()
    return (common or 0) / len(values)


def _tables(plan: JobPlan) -> dict[str, list[PlannedFeature]]:
    """Return the embedding tables: features with ids of the same kind share one."""
    groups: list[list[PlannedFeature]] = []
    for feature in [f for f in plan.features if f.role == "sparse"]:
        group = next((g for g in groups if any(_same_kind(feature, f) for f in g)), None)
        if group is None:
            groups.append([feature])
        else:
            group.append(feature)
    tables: dict[str, list[PlannedFeature]] = {}
    for features in groups:
        first = next((f for f in features if f.column.shape != "list"), features[0])
        stem = re.sub(r"_ids?$", "", first.column.name)
        name = stem if stem.endswith("s") else f"{stem}s"
        tables[name if name not in tables else f"{first.column.name}_table"] = features
    return tables


def _same_kind(one: PlannedFeature, other: PlannedFeature) -> bool:
    a, b = one.column, other.column
    if (a.of or a.shape) != (b.of or b.shape) or "list" not in (a.shape, b.shape):
        return False
    if _nouns(a) & _nouns(b):
        return True
    least = min(a.num_distinct, b.num_distinct)
    kind = "text" if type_of(a) == "BYTES" else "int"
    share = max(_share(a, b), _share(b, a))
    by_chance = 0.0 if kind == "text" else max(_density(a), _density(b))
    return least >= _FEW[kind] and share >= max(_OVERLAP[kind], _CHANCE * by_chance)


def _density(column: ScannedColumn) -> float:
    """Return the share of the integers of a column's range that it has."""
    low, high = pc.min_max(column.values).as_py().values()
    return 0.0 if low is None else column.num_distinct / (high - low + 1)


def _nouns(column: ScannedColumn) -> set[str]:
    """Return the nouns in the names of a column and of the column it is made of."""
    words = words_of(column.name) | (set() if " " in column.why else words_of(column.why))
    return {word.removesuffix("s") for word in words - _NOT_NOUNS}
