"""A first job for a log: which files samples are made of, what each column is, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.init.columns import (
    BECOME_NULL,
    TEXTS,
    Column,
    Role,
    columns_of,
    numbers_in,
    quoted,
    words_of,
)
from pipelines.init.files import Kind
from schemas.arrays import is_text, one_chunk

_LABELS = (
    "label", "target", "clicked", "click", "is_click", "purchased", "purchase", "converted",
    "conversion", "bought", "liked", "like", "is_like", "y",
)  # fmt: skip
_SESSIONS = ({"session", "visit"}, {"user", "uid", "member", "customer", "client", "person"},
             {"device", "cookie", "account", "visitor", "profile"})  # fmt: skip
_TIMES = {"time", "timestamp", "ts", "datetime", "at", "event"}
_NOT_THINGS = {"id", "ids", "fixed", "inview", "list", "seq", "history", "of", "the", "last"}
_OVERLAP = {"int": 0.5, "text": 0.05}
"""Share of values that have to be among another column's for the two to mean the same things:
whole numbers may be equal by chance."""
_FEW_ROWS = 1 << 10
_MANY_ROWS = 1 << 16
"""Rows of a table for few values, and up to which each value has 64."""
_FEW = {"int": 100, "text": 20}
"""Distinct values below which equal values mean nothing."""
_MAX_TABLE = 1 << 22
_SMALL = 10
"""Numbers up to it are read as they are, larger ones as logarithms, or normalized."""
_EARLY_ROWS = 1000
"""Rows at the beginning in which nothing can be learned where nearly all are null."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A column of the samples, and why it is what it is."""

    column: Column
    role: Role
    why: str


@dataclass(frozen=True, slots=True)
class Side:
    """A side table that is looked up.

    Attributes:
        kind: its files.
        key: its column that is looked up.
        asked: column of the samples with that key.
        columns: new name to column, as they are taken.
        time: column from which on a row holds; None when its keys are distinct.
        why: what was seen.
    """

    kind: Kind
    key: str
    asked: str
    columns: Mapping[str, str]
    time: str | None
    why: str


@dataclass(slots=True)
class Plan:
    """A job, before it is written.

    Attributes:
        kind: files that samples are made of.
        inner: what SQL reads from: the source, or a subquery that takes lists apart.
        num_samples: about how many there will be.
        features: columns of the samples.
        session: (column, why).
        time: (column, why).
        is_timed: whether the time is one, rather than a number that stands for it.
        has_gap: whether a pause cuts sessions.
        sides: side tables.
        unnested: list of objects of which each is a sample.
        transforms: new column to what makes it.
        tables: name to features.
        left_out: (what, why) of columns and files that are not used.
    """

    kind: Kind
    inner: str
    num_samples: int
    features: list[Feature] = field(default_factory=list[Feature])
    session: tuple[str, str] = ("", "")
    time: tuple[str, str] = ("", "")
    is_timed: bool = True
    has_gap: bool = False
    sides: list[Side] = field(default_factory=list[Side])
    unnested: str | None = None
    transforms: dict[str, str] = field(default_factory=dict[str, str])
    tables: dict[str, list[Feature]] = field(default_factory=dict[str, list[Feature]])
    left_out: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    @property
    def label(self) -> Feature | None:
        """Return the label, None when none was found."""
        return next((f for f in self.features if f.role == "label"), None)


def typed(kind: Kind) -> Kind:
    """Return files of CSV with the columns that hold numbers declared as numbers."""
    if kind.config.format != "csv":
        return kind
    rows, words = kind.rows, dict(kind.config.columns or {})
    for index, name in enumerate(rows.column_names):
        found = numbers_in(one_chunk(rows[name]))
        if found is not None and not len(found[2]):
            shape, numbers, _ = found
            words[name] = f"{shape}64"
            rows = rows.set_column(index, name, numbers)
    return replace(kind, rows=rows, config=replace(kind.config, columns=words))


def plan_of(kinds: Sequence[Kind], unique: Mapping[tuple[str, str], bool]) -> Plan:
    """Return a job for some kinds of files.

    Args:
        kinds: with typed columns, at least one.
        unique: (kind, column) to whether no value stands in two rows, as far as it is known.
    """
    seen = {kind.name: list(columns_of(kind.rows)) for kind in kinds}
    columns = {n: [c for c in found if isinstance(c, Column)] for n, found in seen.items()}
    entries = {kind.name: _labelled_list(kind) for kind in kinds}

    def evidence(kind: Kind) -> tuple[int, int, str]:
        found = columns[kind.name]
        shown = any(c.shown for c in found) or _clicked_of(kind, found) or entries[kind.name]
        label = _named_label(found) is not None
        timed = any(c.shape == "time" for c in found)
        return 3 * bool(shown) + 2 * label + 2 * timed, kind.num_bytes, kind.name

    kind = max(kinds, key=evidence)
    plan = Plan(kind, quoted(kind.name), kind.num_rows)
    found, name = seen[kind.name], entries[kind.name]
    if name is not None:
        plan.kind = kind = _with_entries(kind, name)
        plan.num_samples, plan.unnested = kind.num_rows, name
        plan.inner = _unnest("* REPLACE (", quoted(name), f"{quoted(name)})", plan.inner)
        found = list(columns_of(kind.rows))
    plan.left_out += [(f"column {c[0]}", c[1]) for c in found if not isinstance(c, Column)]
    mine = _with_label(plan, kind, [c for c in found if isinstance(c, Column)])
    _choose_time(plan, mine)
    _choose_session(plan)
    for other in sorted(kinds, key=lambda k: (k.config.format == "csv", -k.num_bytes)):
        if other.name != kind.name:
            _add_side(plan, other, columns[other.name], unique)
    keys = {plan.session[0], plan.time[0], plan.label and plan.label.column.name}
    plan.features = [_rejecting(f) if f.column.name in keys else f for f in plan.features]
    _scale(plan)
    plan.tables = _tables(plan)
    return plan


def _unnest(before: str, expr: str, name: str, source: str) -> str:
    return f"(SELECT {before}unnest({expr}) AS {name}\n            FROM {source})"


def _labelled_list(kind: Kind) -> str | None:
    """Return a list of objects one of whose fields is a label."""
    for name in kind.rows.column_names:
        values = one_chunk(kind.rows[name])
        listed = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
        if listed and pa.types.is_struct(values.type.value_type):
            entries = columns_of(pa.table({name: values.flatten()}))
            found = [c for c in entries if isinstance(c, Column)]
            if _named_label(found) or _graded_label(found):
                return name
    return None


def _with_entries(kind: Kind, name: str) -> Kind:
    """Return a kind with a row for each entry of a list."""
    lists = one_chunk(kind.rows[name])
    rows = kind.rows.take(pc.list_parent_indices(lists))
    rows = rows.set_column(rows.column_names.index(name), name, lists.flatten())
    return replace(kind, rows=rows, num_rows=kind.num_rows * rows.num_rows // len(lists))


def _rejecting(feature: Feature) -> Feature:
    """Return a key, time or label whose bad values reject their rows."""
    column = feature.column
    expr = column.expr.replace("TRY_CAST(", "CAST(")
    why = column.why.replace(BECOME_NULL, "these reject their rows")
    return replace(feature, column=replace(column, expr=expr, why=why))


def _named_label(columns: Sequence[Column]) -> Column | None:
    known = {c.name: c for c in columns if c.is_binary}
    exact = [known[name] for name in _LABELS if name in known]
    parts = [c for name in _LABELS[:6] for c in known.values() if name in c.words]
    return next(iter([*exact, *parts]), None)


def _graded_label(columns: Sequence[Column]) -> tuple[Column, float] | None:
    """Return an outcome that is a number, such as seconds, and the one above which it is good."""
    for column in columns:
        if column.is_outcome and column.shape in ("int", "float") and not column.is_binary:
            values = pc.fill_null(column.values, 0)
            for bound in (0, pc.quantile(values, 0.5, interpolation="lower")[0].as_py()):
                if 0.01 < pc.mean(pc.greater(values, bound)).as_py() < 0.99:
                    return column, bound
    return None


def _clicked_of(kind: Kind, columns: Sequence[Column]) -> tuple[Column, Column] | None:
    """Return two columns of lists, what was shown and what of it was chosen."""
    lists = [c for c in columns if c.shape == "list" and not c.shown and c.expr == quoted(c.name)]
    for shown in lists:
        for chosen in lists:
            if shown is chosen or shown.of != chosen.of or shown.of == "float":
                continue
            if len(chosen.values) >= len(shown.values) or not len(chosen.values):
                continue
            pairs = zip(
                kind.rows[_source(kind, shown)].to_pylist(),
                kind.rows[_source(kind, chosen)].to_pylist(),
                strict=True,
            )
            both = [(set(a), set(b)) for a, b in list(pairs)[:2000] if a and b]
            if both and sum(b <= a for a, b in both) >= 0.95 * len(both):
                return shown, chosen
    return None


def _source(kind: Kind, column: Column) -> str:
    return next(n for n in kind.rows.column_names if quoted(n) == column.expr)


def _with_label(plan: Plan, kind: Kind, columns: list[Column]) -> list[Column]:
    """Add the label, and what SQL has to take apart for it; return the columns that are left."""
    names = {c.name for c in columns}
    item = next(n for n in ("item", "shown_item", "item_") if n not in names)
    name = "label" if "label" not in names else "label_"
    pairs = next((c for c in columns if c.shown), None)
    both = _clicked_of(kind, columns)
    named, graded = _named_label(columns), _graded_label(columns)
    used, shown, entry, sql = set[str](), None, item, item
    if pairs is not None:
        used, shown, entry = {pairs.name}, pairs, "pair_"
        sql = f"regexp_replace({entry}, '-[01]$', '')"
        sql = f"CAST({sql} AS BIGINT)" if pairs.of == "int" else sql
        label, why = "right(pair_, 1)", f"the 0 or 1 of each entry of {pairs.name}"
    elif both is not None:
        used, shown = {c.name for c in both}, both[0]
        label = f"coalesce(list_contains({both[1].expr}, {item}), false)"
        why = f"whether {both[1].name} has the entry of {shown.name}"
    elif named is not None and not named.values.null_count:
        _add(plan, named, "label", "0 or 1 in every row, and its name")
        return [c for c in columns if c is not named]
    elif named is not None:
        used, name, why = {named.name}, named.name, f"its name{_nulls(named)}"
        label = f"coalesce({named.expr}, {'false' if named.shape == 'bool' else '0'})"
    elif graded is not None:
        column, bound = graded
        label = f"coalesce({column.expr}, 0) > {bound}"
        why = f"whether {column.name} is above {bound}{_nulls(column)}"
    else:
        return columns
    if shown is not None:
        plan.inner = _unnest("*, ", shown.expr, entry, plan.inner)
        looked_at = min(shown.num_rows, TEXTS) if shown.shown else shown.num_rows
        plan.num_samples = plan.num_samples * len(shown.values) // looked_at
        things = Column(item, sql, shown.of or "int", shown.values, 0, why=shown.name)
        _add(plan, things, "sparse", f"one sample for each entry of {shown.name}")
    made = Column(name, f"CAST({label} AS TINYINT)", "int", pa.array([0, 1]), 0)
    _add(plan, made, "label", why)
    return [c for c in columns if c.name not in used]


def _nulls(column: Column) -> str:
    """Return that rows without a value get the label 0."""
    share = column.num_nulls / max(1, column.num_rows)
    return f"; {share:.1%} of the rows have none, which counts as 0" if column.num_nulls else ""


def _add(plan: Plan, column: Column, role: Role, why: str) -> None:
    plan.features.append(Feature(column, role, why))


def _role(column: Column, *, in_side: bool = False) -> tuple[Role, str]:
    """Return the role of a column, and why."""
    distinct = column.num_distinct
    if column.shape == "time":
        return "kept", f"a time ({column.why})"
    if column.is_outcome and not in_side:
        return "kept", "by its name known only after the sample: a model must not read it"
    if column.shape == "list":
        many = f"{distinct} distinct values"
        if column.of == "float":
            return "kept", f"{column.why}; a list of numbers that are no ids"
        return "sparse", f"{column.why}, {many}"
    if distinct <= 1:
        return "kept", "the same in every row that was looked at"
    if column.is_prose:
        return "kept", "a long text; make features of it in SQL"
    if column.is_row_id:
        return "kept", "another value in nearly every row: nothing can be learned of one"
    if column.shape in ("float", "bool"):
        return "dense", column.why or ("a number" if column.shape == "float" else "true or false")
    if column.is_id:
        kind = "texts" if column.shape == "text" else column.why or "numbers"
        return "sparse", f"{distinct} distinct {kind}"
    return "dense", column.why or "a number, by its name or its range"


def _choose_time(plan: Plan, columns: Sequence[Column]) -> None:
    """Choose what orders the samples of a session, and add the other columns."""
    times = [c for c in columns if c.shape == "time"]
    times.sort(key=lambda c: (c.num_nulls > 0, not c.words & _TIMES, -c.num_distinct))
    if times:
        plan.time = times[0].name, f"{times[0].why}; {times[0].num_distinct} distinct"
    else:
        names = {c.name for c in columns}
        name = next(n for n in ("row_time", "row_time_") if n not in names)
        constant = Column(name, "CAST(0 AS BIGINT)", "int", pa.array([0]), 0)
        why = "no column is a time: samples of a session stay in the order of the files"
        _add(plan, constant, "kept", why)
        plan.time, plan.is_timed = (name, why), False
    for column in columns:
        _add(plan, column, *_role(column))


def _choose_session(plan: Plan) -> None:
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
            plan.session = key.name, _session_why(key, "its name")
            plan.has_gap = index > 0 and plan.is_timed
            if not index:
                _set_role(plan, key, "kept", "names a session: nothing can be learned of one")
            return
    if repeating:
        key = max(repeating, key=lambda c: c.num_distinct)
        why = "no name says session or user; of the columns that repeat the one with most values"
        plan.session, plan.has_gap = (key.name, _session_why(key, why)), plan.is_timed
        _set_role(plan, key, "sparse", "the session key; may name users")
    elif candidates:
        why = "no value of any column repeats: each row is a session"
        plan.session = candidates[0].name, why
    else:
        why = (
            "no column looks like a session or a user: all rows are one session; name a better one"
        )
        plan.session = "all_rows", why
        _add(plan, Column("all_rows", "CAST(0 AS BIGINT)", "int", pa.array([0]), 0), "kept", why)


def _set_role(plan: Plan, column: Column, role: Role, why: str) -> None:
    for index, feature in enumerate(plan.features):
        if feature.column is column:
            plan.features[index] = Feature(column, role, why)


def _session_why(key: Column, why: str) -> str:
    nulls = f", {key.num_nulls} rows without it are rejected" if key.num_nulls else ""
    return f"{why}; {key.num_rows / max(1, key.num_distinct):.1f} rows a value{nulls}"


def _add_side(
    plan: Plan, kind: Kind, columns: Sequence[Column], unique: Mapping[tuple[str, str], bool]
) -> None:
    """Look samples up in some files, when they have a key of them."""
    found = _key_of(plan, kind, columns)
    what = f"{kind.name} ({kind.config.files})"
    if found is None:
        plan.left_out.append((what, "has no column whose values samples of the log have"))
        return
    key, asked, why = found
    source = _source(kind, key)
    time = None
    if key.num_nulls == key.num_rows or not unique.get((kind.name, source), False):
        plain = [c for c in columns if c.shape == "time" and c.expr == quoted(c.name)]
        if not plain:
            reason = f"has several rows of one {source}, and no time from which on each holds"
            plan.left_out.append((what, f"{reason}; see samples.per and samples.events"))
            return
        time = _source(kind, plain[0])
    names = {f.column.name for f in plan.features}
    plain = {quoted(name) for name in kind.rows.column_names}
    taken: dict[str, Column] = {}
    read: set[str] = set()
    without: dict[str, list[str]] = {}
    for column in columns:
        if column is key or (time is not None and column.expr == quoted(time)):
            continue
        reason = None
        if column.name in names:
            reason = "the samples have columns of these names already"
        elif column.is_prose:
            reason = "long texts"
        elif column.expr not in plain:
            raw = _transformed(plan, kind, column, names)
            if raw is not None:
                taken[column.name] = raw
                read.add(column.name)
                continue
            reason = f"{column.why or column.shape}: only SQL makes features of them"
        if reason is None:
            taken[column.name] = column
        else:
            without.setdefault(reason, []).append(column.name)
    if not taken:
        plan.left_out.append((what, "has nothing that the samples have not, or that they can take"))
        return
    for column in taken.values():
        role, why_role = _role(column, in_side=True)
        if column.name in read:
            role, why_role = "kept", "a transform makes a feature of it"
        _add(plan, column, role, f"from {kind.name}; {why_role}")
    for reason, left in without.items():
        plan.left_out.append((f"{kind.name}: {', '.join(left)}", reason))
    found_columns = {name: _source(kind, column) for name, column in taken.items()}
    plan.sides.append(Side(kind, source, asked, found_columns, time, why))


def _transformed(plan: Plan, kind: Kind, column: Column, names: set[str]) -> Column | None:
    """Make what SQL makes of a side table's column by a transform; return the column as it is."""
    if column.shape not in ("int", "list") or column.name not in kind.rows.column_names:
        return None
    name = f"{column.name}_{'list' if column.shape == 'list' else 'code'}"
    values = one_chunk(kind.rows[column.name])
    if name in names or not (is_text(values.type) or pa.types.is_floating(values.type)):
        return None
    role, why = _role(column, in_side=True)
    plan.transforms[name] = column.expr
    _add(plan, replace(column, name=name), role, f"from {column.name} of {kind.name}; {why}")
    shape = "text" if is_text(values.type) else "float"
    return Column(column.name, quoted(column.name), shape, values, len(values), values.null_count)


def _scale(plan: Plan) -> None:
    """Make numbers of a wide range small by transforms; the numbers themselves are kept."""
    for index, feature in enumerate(list(plan.features)):
        column = feature.column
        values = column.values.drop_null()
        if feature.role != "dense" or column.shape == "bool" or not len(values):
            continue
        low, middle, high = pc.quantile(values, [0, 0.5, 1]).to_pylist()
        if low >= -_SMALL and high <= _SMALL:
            continue
        seen = f"{feature.why}; {low:g} to {high:g}, half of them below {middle:g}"
        late = len(column.values.slice(0, _EARLY_ROWS).drop_null()) < 0.1 * _EARLY_ROWS
        wide = column.is_wide or (late and len(column.values) > _EARLY_ROWS and low >= 0)
        way, name = ("log" if wide else "normalize"), f"{column.name}_{'log' if wide else 'scaled'}"
        name += "_" * any(f.column.name == name for f in plan.features)
        plan.transforms[name] = f"{{{way}: {{column: {column.name}}}}}"
        plan.features[index] = Feature(
            column, "kept", f"{feature.why}; {name} is read in its place"
        )
        made = Column(name, "", "float", values, column.num_rows)
        _add(plan, made, "dense", f"{seen}: {way} of {column.name}")


def _key_of(plan: Plan, kind: Kind, columns: Sequence[Column]) -> tuple[Column, str, str] | None:
    """Return the key of a side table, the column of samples that has it, and why."""
    scalars = [f.column for f in plan.features if f.column.shape in ("int", "text")]
    plain = {quoted(n) for n in kind.rows.column_names}
    keys = [c for c in columns if c.shape in ("int", "text") and c.expr in plain]
    named = [
        (key, mine)
        for key in keys
        for mine in scalars
        if key.name == mine.name and key.shape == mine.shape and key.is_id
        and key.num_distinct > 0.5 * key.num_rows
    ]  # fmt: skip
    if named:
        key, mine = max(named, key=lambda pair: pair[0].num_distinct / pair[0].num_rows)
        return key, mine.name, f"both have a column {mine.name!r}"
    for key in keys:
        if (
            key.shape != "text"
            or key.is_prose
            or key.num_distinct < max(_FEW["text"], 0.99 * key.num_rows)
        ):
            continue
        for mine in scalars:
            share = _share(mine, key)
            enough = share >= _OVERLAP["text"] and mine.num_distinct >= _FEW["text"]
            if mine.shape == "text" and enough:
                why = f"{share:.0%} of the values of {mine.name!r} are among its first {key.name!r}"
                return key, mine.name, why
    return None


def _share(mine: Column, other: Column) -> float:
    """Return the share of a column's distinct values that another has."""
    values = pc.unique(mine.values.drop_null())
    if not len(values) or values.type != other.values.type:
        return 0.0
    found = pc.sum(pc.is_in(values, value_set=pc.unique(other.values.drop_null()))).as_py()
    return (found or 0) / len(values)


def _tables(plan: Plan) -> dict[str, list[Feature]]:
    """Return the embedding tables: features that mean the same things share one."""
    found: list[list[Feature]] = []
    for feature in [f for f in plan.features if f.role == "sparse"]:
        home = next((t for t in found if any(_same_things(feature, f) for f in t)), None)
        if home is None:
            found.append([feature])
        else:
            home.append(feature)
    tables: dict[str, list[Feature]] = {}
    for features in found:
        first = next((f for f in features if f.column.shape != "list"), features[0])
        stem = re.sub(r"_ids?$", "", first.column.name)
        name = stem if stem.endswith("s") else f"{stem}s"
        tables[name if name not in tables else f"{first.column.name}_table"] = features
    return tables


def _same_things(one: Feature, other: Feature) -> bool:
    a, b = one.column, other.column
    if (a.of or a.shape) != (b.of or b.shape) or "list" not in (a.shape, b.shape):
        return False
    if _things(a) & _things(b):
        return True
    least = min(a.num_distinct, b.num_distinct)
    kind = "text" if type_of(a) == "BYTES" else "int"
    return least >= _FEW[kind] and max(_share(a, b), _share(b, a)) >= _OVERLAP[kind]


def _things(column: Column) -> set[str]:
    """Return what the values are of, by the names of the column and of the one it is made of."""
    words = words_of(column.name) | (set() if " " in column.why else words_of(column.why))
    return {word.removesuffix("s") for word in words - _NOT_THINGS}


def num_rows_of(features: Sequence[Feature], scale: float) -> int:
    """Return the rows of a table, a power of two: enough that hashes of few values seldom collide.

    64 for each of a few hundred values (one in 128 shares its row), down to four for each of many.

    Args:
        features: that look into it.
        scale: rows of the log for each that was looked at.
    """
    distinct = sum(f.column.num_distinct for f in features)
    values = max(1, sum(len(f.column.values) for f in features))
    expected = distinct * (scale if distinct > 0.1 * values else 1.0)
    wanted = max(4 * expected, min(64 * expected, _MANY_ROWS), _FEW_ROWS)
    return min(_MAX_TABLE, 1 << int(wanted - 1).bit_length())


def type_of(column: Column) -> Literal["INT", "FLOAT", "BYTES"]:
    """Return the type of a column in the schema."""
    shape = column.of or column.shape
    if shape == "text":
        return "BYTES"
    return "FLOAT" if shape == "float" else "INT"
