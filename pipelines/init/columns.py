"""Columns of a log: the shape of their values, and the SQL that makes samples' columns of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Literal

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.pipelines.init.sample_sources import MANY
from presage.pipelines.samples.statements import quoted_name
from presage.schemas.arrays import offsets_of, one_chunk

Shape = Literal["int", "float", "bool", "text", "time", "list"]
Role = Literal["sparse", "dense", "label", "kept"]

_TIME_WORDS = {"time", "ts", "timestamp", "date", "datetime", "at", "created", "epoch", "unix"}
_ID_WORDS = {"id", "ids", "uid", "key", "code", "hash", "user", "item", "article", "video", "song"}
_ROW_WORDS = {"impression", "request", "event", "row", "order", "transaction", "log", "index"}
_DENSE_WORDS = {
    "num", "count", "counts", "cnt", "age", "price", "cost", "amount", "duration", "length", "len",
    "size",
    "rank", "position", "days", "hours", "seconds", "sec", "ms", "minutes", "ratio", "rate", "ctr",
    "score", "depth", "width", "height", "value", "quantity", "qty", "weight", "distance",
    "playtime",
}  # fmt: skip
_OUTCOME_WORDS = {
    "click", "clicked", "clicks", "like", "liked", "follow", "comment", "forward", "hate", "view",
    "viewed", "play", "played", "playtime", "dwell", "watch", "watched", "stay", "finish",
    "finished", "purchase", "purchased", "bought", "conversion", "converted", "positive", "next",
    "read", "scroll", "label", "target", "share", "shared", "rating", "enter", "profile",
    "outcome", "outcomes", "result", "purchases", "saved", "skipped", "revenue",
}  # fmt: skip
_PAST_WORDS = {"history", "seq", "recent", "last", "past", "prev", "previous", "items", "id", "ids"}
TEXTS = 2000
"""Number of texts of a column that are split into lists."""
BECOME_NULL = "these become null"
_WIDE = 50
"""A column has a wide range if its maximum is more than so many times its median."""
_FEW_CODES = 50
"""Floats that are at most so many distinct integers are codes."""
_NUMBERS: tuple[tuple[Shape, pa.DataType, str], ...] = (
    ("int", pa.int64(), r"^[+-]?\d{1,18}$"),
    ("float", pa.float64(), r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"),
)
_FORMATS = (
    "%m/%d/%Y %I:%M:%S %p", "%d/%m/%Y %H:%M:%S", "%m/%d/%Y %H:%M:%S", "%Y/%m/%d %H:%M:%S",
    "%Y%m%d%H%M%S", "%Y-%m-%d-%H-%M-%S", "%d.%m.%Y %H:%M:%S", "%d-%b-%Y %H:%M:%S",
    "%a %b %d %H:%M:%S %Y", "%d/%b/%Y:%H:%M:%S %z", "%Y%m%d", "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y",
)  # fmt: skip
_EPOCHS = (
    ("s", 1, " * 1000000"), ("ms", 1_000, " * 1000"), ("us", 1_000_000, ""),
    ("ns", 1_000_000_000, " // 1000"),
)  # fmt: skip
_EARLY, _LATE = 946_684_800, 4_102_444_800
"""Seconds of the years 2000 and 2100: integers between them, in some unit, may be times."""
_SHOWN = re.compile(r"\S*[^\s-]-[01]")
_OFFSET = re.compile(r"\d[T ]\d\d?:.*[+-]\d\d(:?\d\d)?$")
_CODE = re.compile(r"[A-Za-z0-9_]{1,24}|-?\d+(\.\d+)?")
_NUMBERED = re.compile(r"[A-Za-z]{0,3}\d+|-?\d+\.\d+")
with duckdb.connect() as _database:
    _KEYWORDS = frozenset(
        keyword
        for (keyword,) in _database.execute(
            "SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category <> 'unreserved'"
        ).fetchall()
    )


@dataclass(frozen=True, slots=True)
class ScannedColumn:
    """A possible column of samples.

    `expr` is its SQL, `values` are those of the first rows, of which there are `num_rows`; lists
    are flattened, and `of` is the shape of their values. `why` is the reason for the shape. `shown`
    tells of texts of pairs `id-0 id-1`: items shown, and whether clicked.
    """

    name: str
    expr: str
    shape: Shape
    values: pa.Array
    num_rows: int
    num_nulls: int = 0
    of: Shape | None = None
    why: str = ""
    shown: bool = False

    @property
    def words(self) -> set[str]:
        """Words of its name."""
        return words_of(self.name)

    @property
    def stems(self) -> set[str]:
        """Words of its name, and the same without an s at their ends."""
        return self.words | {word.removesuffix("s") for word in self.words}

    @property
    def num_distinct(self) -> int:
        """Number of distinct values."""
        return len(pc.unique(self.values.drop_null()))

    @property
    def is_id(self) -> bool:
        """Whether its values are ids."""
        if self.shape == "int":
            named = bool(self.words & {"id", "key", "code"})
            return named or not (self.words & _DENSE_WORDS or self.is_wide)
        return self.shape == "text" and not self.is_prose

    @property
    def is_times(self) -> bool:
        """Whether its integers are times since 1970 rather than ids."""
        if (self.of or self.shape) != "int" or not len(self.values):
            return False
        low, high = pc.quantile(self.values, [0.01, 0.99]).to_pylist()
        in_range = any(_EARLY * unit <= low and high <= _LATE * unit for _, unit, _ in _EPOCHS)
        return in_range and (bool(self.stems & _TIME_WORDS) or not self.stems & _ID_WORDS)

    @property
    def is_amounts(self) -> bool:
        """Whether, by its name, its list has numbers rather than ids, such as prices."""
        is_list, stems = self.shape == "list", self.stems
        return is_list and bool(stems & _DENSE_WORDS) and not stems & {"id", "code"}

    @property
    def is_prose(self) -> bool:
        """Whether its values are prose or URLs rather than short names."""
        if self.shape != "text":
            return False
        texts = self.values.drop_null()
        lengths = pc.mean(pc.utf8_length(texts)).as_py() or 0
        return lengths > 30 or (lengths > 16 and self.num_distinct > 0.8 * len(texts))

    @property
    def is_binary(self) -> bool:
        """Whether its values are 0 and 1, or null and 1."""
        distinct = set(pc.unique(self.values).to_pylist())
        return self.shape in ("int", "bool") and distinct - {None, 0} == {1} and len(distinct) > 1

    @property
    def is_wide(self) -> bool:
        """Whether its numbers have a wide range, see `_WIDE`."""
        is_id = self.words & _ID_WORDS and not self.words & _DENSE_WORDS
        if is_id or self.shape not in ("int", "float"):
            return False
        low, middle, high = pc.quantile(self.values, [0, 0.5, 1]).to_pylist()
        return low is not None and low >= 0 and high > _WIDE * max(1, middle)

    @property
    def is_outcome(self) -> bool:
        """Whether, by its name, it is known only after the sample."""
        past = _PAST_WORDS if self.shape == "list" else {"id", "ids"}
        return bool(self.words & _OUTCOME_WORDS) and not self.words & past

    @property
    def is_row_id(self) -> bool:
        """Whether it identifies single rows, so that no value can be learned."""
        many = self.num_distinct > 0.9 * max(1, len(self.values))
        nouns = self.words & (_ID_WORDS - {"id", "ids", "key"})
        return self.shape in ("int", "text") and (
            (bool(self.words & _ROW_WORDS) and self.num_distinct > 1) or (many and not nouns)
        )


def words_of(name: str) -> set[str]:
    """Return the words of a name.

    Example:
        >>> sorted(words_of("userId_2")), sorted(words_of("is_click"))
        (['2', 'id', 'user'], ['click', 'is'])
    """
    spaced = re.sub(r"([a-z])([A-Z])", r"\1_\2", name)
    return {word.lower() for word in re.split(r"[^A-Za-z0-9]+", spaced) if word}


def quoted(name: str) -> str:
    """Return a column's name as an SQL identifier, in quotes if needed."""
    plain = re.fullmatch(r"[a-z_][a-z0-9_]*", name) and name not in _KEYWORDS
    return name if plain else quoted_name(name)


def plain_name(name: str) -> str:
    """Return a name of letters, digits and underlines.

    Example:
        >>> plain_name("User ID"), plain_name("2nd")
        ('user_id', 'c_2nd')
    """
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    text = re.sub(r"\W+", "_", spaced).strip("_").lower() or "column"
    return f"c_{text}" if text[0].isdigit() else text


def columns_of(table: pa.Table) -> Iterator[ScannedColumn | tuple[str, str]]:
    """Yield the columns of raw rows; (name, reason) for columns that samples cannot have."""
    taken = set[str]()
    for name in table.column_names:
        for column in _columns(plain_name(name), quoted(name), one_chunk(table[name])):
            if isinstance(column, ScannedColumn):
                names = (f"{column.name}_{number}" for number in count(2))
                free = next(n for n in chain([column.name], names) if n not in taken)
                taken.add(free)
                yield replace(column, name=free)
            else:
                yield column


def _columns(name: str, expr: str, values: pa.Array) -> Iterator[ScannedColumn | tuple[str, str]]:
    kind, t = values.type, pa.types
    rows, nulls = len(values), values.null_count
    if nulls == rows:
        yield name, "null in all of the first rows"
        return

    def column(
        shape: Shape, sql: str = expr, converted: pa.Array = values, **more: object
    ) -> ScannedColumn:
        return ScannedColumn(name, sql, shape, converted, rows, nulls, **more)  # pyright: ignore[reportArgumentType]

    if t.is_boolean(kind):
        yield column("bool")
    elif t.is_integer(kind):
        sql = f"CAST({expr} AS BIGINT)" if t.is_uint64(kind) else expr
        yield _epoch(column("int", sql), name) or column("int")
    elif t.is_decimal(kind) and kind.scale <= 0:
        yield _whole_decimal(column("int"))
    elif t.is_floating(kind) or t.is_decimal(kind):
        sql = f"CAST({expr} AS DOUBLE)" if t.is_decimal(kind) else expr
        yield _whole(_finite(column("float", sql)))
    elif t.is_timestamp(kind) or t.is_date(kind):
        yield column("time", converted=values.cast(pa.timestamp("us"), safe=False), why="its type")
    elif t.is_string(kind) or t.is_large_string(kind):
        yield _text(name, expr, values.cast(pa.string()))
    elif t.is_struct(kind):
        for index, field in enumerate(kind):
            inner = pc.struct_field(values, [index])
            yield from _columns(
                f"{name}_{plain_name(field.name)}", f"{expr}.{quoted(field.name)}", inner
            )
    elif t.is_list(kind) or t.is_large_list(kind):
        yield from _lists(name, expr, values, column)
    else:
        yield name, f"of type {kind}, which samples cannot have; cast it in SQL"


def _lists(
    name: str, expr: str, values: pa.Array, column: Callable[..., ScannedColumn]
) -> Iterator[ScannedColumn | tuple[str, str]]:
    inner, t = values.type.value_type, pa.types
    flat = values.flatten()
    if t.is_struct(inner):
        for index, field in enumerate(inner):
            part = pa.LargeListArray.from_arrays(_offsets(values), pc.struct_field(flat, [index]))
            sql = f"list_transform({expr}, lambda x: x.{quoted(field.name)})"
            yield from _columns(f"{name}_{plain_name(field.name)}", sql, part)
    elif t.is_integer(inner) or t.is_floating(inner) or t.is_string(inner):
        of = "int" if t.is_integer(inner) else "float" if t.is_floating(inner) else "text"
        sql = f"list_filter({expr}, lambda x: x IS NOT NULL)" if flat.null_count else expr
        why = "a list, without its nulls" if flat.null_count else "a list"
        yield column("list", sql, flat.drop_null(), of=of, why=why)
    else:
        yield name, f"a list of {inner}, which samples cannot have; make numbers of it in SQL"


def _offsets(values: pa.Array) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    return pa.array(offsets_of(lengths))


def _epoch(column: ScannedColumn, name: str) -> ScannedColumn | None:
    """Return a column of integers as times if its name and its range suggest it, else None."""
    if not words_of(name) & _TIME_WORDS:
        return None
    low, high = pc.quantile(column.values, [0.01, 0.99]).to_pylist()  # a few may be 0 or -1
    for unit, scale, factor in _EPOCHS:
        if _EARLY * scale <= low and high <= _LATE * scale:
            numbers = column.values.to_numpy(zero_copy_only=False).astype(np.float64)
            times = pa.array(numbers / scale * 1e6, from_pandas=True).cast(pa.int64(), safe=False)
            times, sql = times.cast(pa.timestamp("us")), f"make_timestamp({column.expr}{factor})"
            why = f"integers, {unit} since 1970"
            return replace(column, expr=sql, shape="time", values=times, why=why)
    return None


def _finite(column: ScannedColumn) -> ScannedColumn:
    """Return a column of floats with null instead of NaN and infinity."""
    if pc.all(pc.is_finite(column.values.drop_null().cast(pa.float64()))).as_py():
        return column
    sql = f"CASE WHEN isfinite({column.expr}) THEN {column.expr} END"
    return replace(column, expr=sql, why="NaN and infinity become null")


def _whole_decimal(column: ScannedColumn) -> ScannedColumn:
    """Return a column of decimals without fraction as integers, or as texts if they are larger."""
    try:
        numbers = column.values.cast(pa.int64())
    except pa.ArrowInvalid:
        sql, texts = f"CAST({column.expr} AS VARCHAR)", column.values.cast(pa.string())
        return replace(column, expr=sql, shape="text", values=texts, why="large whole numbers")
    sql = f"CAST({column.expr} AS BIGINT)"
    column = replace(column, expr=sql, values=numbers)
    return _epoch(column, column.name) or column


def _whole(column: ScannedColumn) -> ScannedColumn:
    """Return a column of floats that are ids or codes as integers."""
    values = column.values.cast(pa.float64()).drop_null()
    if not pc.all(pc.equal(pc.floor(values), values)).as_py():
        return column
    few = column.num_distinct <= min(_FEW_CODES, 0.05 * len(values))
    codes = few and (column.num_distinct > 2 or column.is_outcome)
    if column.words & {"id", "code"} or (codes and not column.words & _DENSE_WORDS):
        numbers = column.values.cast(pa.float64()).cast(pa.int64(), safe=False)
        sql = f"CAST({column.expr} AS BIGINT)"
        return replace(column, expr=sql, shape="int", values=numbers, why="whole numbers")
    return column


def numbers_in(texts: pa.Array) -> tuple[Shape, pa.Array, pa.Array] | None:
    """Return shape and values if nearly all texts are numbers, and the other texts; else None."""
    present = texts.drop_null()
    if not len(present) or pc.any(pc.match_substring_regex(present, r"^-?0\d")).as_py():
        return None  # a name such as 007
    for shape, kind, form in _NUMBERS:
        fits = pc.match_substring_regex(texts, form)
        odd = texts.filter(pc.invert(fits)).drop_null()
        if len(odd) <= (1 - MANY) * len(present):
            return shape, pc.if_else(fits, texts, None).cast(kind), odd
    return None


def _text(name: str, expr: str, values: pa.Array) -> ScannedColumn:
    """Return a column of texts as times, lists, numbers, or texts."""
    texts = values.drop_null()
    sample = texts.slice(0, TEXTS).to_pylist()
    full = [text for text in sample if text.strip()]
    rows, nulls = len(values), values.null_count

    def column(sql: str, shape: Shape, converted: pa.Array, **more: object) -> ScannedColumn:
        return ScannedColumn(name, sql, shape, converted, rows, nulls, **more)  # pyright: ignore[reportArgumentType]

    parsed = numbers_in(values)
    if parsed is not None:
        shape, numbers, odd = parsed
        cast, why = ("TRY_CAST" if len(odd) else "CAST"), "numbers"
        if len(odd):
            share = f"{len(odd)} of {rows - nulls} values, such as {odd[0].as_py()!r:.40}"
            why += f", except {share}; {BECOME_NULL}"
        sql = f"{cast}({expr} AS {'BIGINT' if shape == 'int' else 'DOUBLE'})"
        plain = column(sql, shape, numbers, why=why)
        return _whole(plain) if shape == "float" else _epoch(plain, name) or plain
    if {text.strip().lower() for text in full} in ({"true", "false"}, {"true"}, {"false"}):
        booleans = pc.equal(pc.utf8_lower(pc.utf8_trim_whitespace(values)), "true")
        return column(f"CAST({expr} AS BOOLEAN)", "bool", booleans, why="true or false")
    parsed_times = _times(expr, texts)
    if parsed_times is not None:
        sql, times, why = parsed_times
        return column(sql, "time", times, why=why)
    return _list_in(expr, full, column) or column(expr, "text", values)


def _times(expr: str, texts: pa.Array) -> tuple[str, pa.Array, str] | None:
    """Return (SQL, times, reason) of texts of which nearly all are times, else None."""
    casts = [("CAST(x AS TIMESTAMP)", "TRY_CAST(x AS TIMESTAMP)", "ISO times")]
    if any(_OFFSET.search(text) for text in texts.to_pylist() if text):
        zoned = "CAST({}(x AS TIMESTAMPTZ) AS TIMESTAMP)"  # a cast to TIMESTAMP ignores the zone
        casts = [(zoned.format("CAST"), zoned.format("TRY_CAST"), "ISO times with a zone, as UTC")]
    casts += [(f"strptime(x, '{f}')", f"try_strptime(x, '{f}')", f"times as {f}") for f in _FORMATS]
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("_texts", pa.table({"x": texts}))
        for sql, attempt, why in casts:
            query = f"SELECT {attempt} AS t FROM _texts"
            first = connection.sql(query + " LIMIT 100").to_arrow_table()["t"]
            if 2 * first.null_count > len(first):
                continue
            times = one_chunk(connection.sql(query).to_arrow_table()["t"])
            if times.null_count <= (1 - MANY) * len(times):
                cast = sql.replace("x", expr, 1)
                if "%z" in sql:
                    cast = f"CAST({cast} AS TIMESTAMP)"
                return cast, times.cast(pa.timestamp("us"), safe=False), why
    return None


def _list_in(
    expr: str, texts: list[str], column: Callable[..., ScannedColumn]
) -> ScannedColumn | None:
    """Return texts of several values, such as `1|2|3` or `[1, 2]`, as lists; else None."""
    if not texts:
        return None
    if sum(t.strip()[0] == "[" and t.strip()[-1] == "]" for t in texts) > MANY * len(texts):
        parts = [[w.strip().strip("'\"") for w in t.strip()[1:-1].split(",")] for t in texts]
        words = [w for part in parts for w in part if w]
        of, values = _typed(words)
        types = {"int": "BIGINT[]", "float": "FLOAT[]", "text": "VARCHAR[]"}
        return column(f"CAST({expr} AS {types[of]})", "list", values, of=of, why="lists in [ ]")
    for mark in ("|", " ", ";", ","):
        parts = [[w for w in t.strip().split(mark) if w] for t in texts]
        if sum(len(p) > 1 for p in parts) < 0.2 * len(texts):
            continue
        words = [w.strip() for part in parts for w in part]
        if mark == " " and all(map(_SHOWN.fullmatch, words)):
            of, values = _typed([w.rpartition("-")[0] for w in words])
            sql = f"list_filter(string_split({expr}, ' '), lambda x: x <> '')"
            why = "pairs of an id and 0 or 1: the items shown, and whether clicked"
            return column(sql, "list", values, of=of, why=why, shown=True)
        form = _NUMBERED if mark == " " else _CODE
        if sum(bool(form.fullmatch(w)) for w in words) < MANY * len(words):
            continue
        of, values = _typed(words)
        sql = f"list_filter(string_split({expr}, '{mark}'), lambda x: trim(x) <> '')"
        if of != "text":
            cast = "BIGINT" if of == "int" else "FLOAT"
            sql = f"list_transform({sql}, lambda x: CAST(x AS {cast}))"
        return column(sql, "list", values, of=of, why=f"values between {mark!r}")
    return None


def _typed(words: list[str]) -> tuple[Shape, pa.Array]:
    """Return the shape of all words, and the words converted to it."""
    texts = pa.array(words, pa.string())
    parsed = numbers_in(texts)
    if parsed is not None and not len(parsed[2]):
        return parsed[0], parsed[1]
    return "text", texts


def type_of(column: ScannedColumn) -> Literal["INT", "FLOAT", "BYTES"]:
    """Return the type of a column in the schema."""
    shape = column.of or column.shape
    if shape == "text":
        return "BYTES"
    return "FLOAT" if shape == "float" else "INT"
