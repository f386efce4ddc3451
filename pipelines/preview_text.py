"""A preview as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from presage.schemas.errors import printable

# Printing.

WIDTH = 100
_VALUE_WIDTH = 28
_LIST_VALUES = 4


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the result of `preview`; `WIDTH` columns are enough."""
    result = _printable(result)
    whole = all(source["whole"] for source in result["sources"].values())
    samples = f"{result['num_samples']} samples in {result['num_sessions']} sessions"
    rows = f"{'all' if whole else 'the first'} {result['rows']} rows of {result['input']}"
    console.print(f"{result['job']}: {samples} from {rows}", soft_wrap=True)
    _print(console, _sources_table(result["sources"]))
    for name, source in result["sources"].items():
        columns = ", ".join(f"{column} {kind}" for column, kind in source["columns"].items())
        console.print(Text.assemble((f"{name}: ", "bold"), columns), highlight=False)
    _print(console, _samples_table(result["samples"]))
    _reject_lines(console, result["rejects"])
    estimate = "" if whole else ", estimated"
    _print(
        console,
        _groups_table(result["groups"], estimate),
        _tables_table(result["tables"], estimate),
    )
    _print(console, _splits_table(result["splits"], estimate))
    if result["joins"]:
        _print(console, _joins_table(result["joins"], estimate))
    for note in result["notes"]:
        console.print(Text.assemble(("note: ", "bold"), note), highlight=False)


def _printable(value: Any) -> Any:
    """Return a value in which all texts, of files and of the job, are printable."""
    if isinstance(value, dict):
        return {printable(str(key)): _printable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_printable(each) for each in value]
    return printable(value).replace("\n", r"\n") if isinstance(value, str) else value


def _print(console: Console, *tables: Table) -> None:
    for table in tables:
        console.print(table, highlight=False)


def _table(title: str, columns: Sequence[str], numbers: Iterable[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        right = name in numbers
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    return table


def _sources_table(sources: Mapping[str, Mapping[str, Any]]) -> Table:
    names = ("source", "format", "files", "MB", "rows read")
    table = _table("Sources", names, names[2:])
    for name, source in sources.items():
        read = f"{source['rows_read']:,}" + ("" if source["whole"] else " of more")
        size = f"{source['num_bytes'] / 1e6:,.1f}"
        table.add_row(name, source["format"], f"{source['num_files']:,}", size, read)
    return table


def _samples_table(samples: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for each column: samples have many, and values repeat within a session."""
    table = _table(f"First {len(samples)} samples, one after the other", ("column", "values"))
    for name in samples[0] if samples else ():
        runs = [(v, len(list(run))) for v, run in groupby(_short(s[name]) for s in samples)]
        values = (f"{value} (x{times})" if times > 1 else value for value, times in runs)
        table.add_row(name, Text("  ".join(values)))
    return table


def _short(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        shown = ", ".join(_short(v) for v in value[:_LIST_VALUES])
        more = f", +{len(value) - _LIST_VALUES}" if len(value) > _LIST_VALUES else ""
        return f"[{shown}{more}]"
    text = str(value)
    return text if len(text) <= _VALUE_WIDTH else text[: _VALUE_WIDTH - 3] + "..."


def _reject_lines(console: Console, rejects: Mapping[str, Any]) -> None:
    if not rejects["num"]:
        console.print("No rejects.\n")
        return
    table = _table(
        f"Rejects: {rejects['num']:,}, {rejects['share']:.1%} of the rows for samples",
        ("rows", "reason"),
        ("rows",),
    )
    for each in rejects["reasons"]:
        table.add_row(f"{each['num']:,}", Text(each["reason"]))
    first = _table("First rejects", ("file", "row", "value"), ("row",))
    for each in rejects["first"]:
        row = "" if each["position"] is None else str(each["position"])
        first.add_row(Text(each["file"]), row, Text(each["value"][: 2 * WIDTH]))
    _print(console, table, first)


def _groups_table(groups: Mapping[str, Mapping[str, Any]], estimate: str) -> Table:
    names = ("group", "columns", "unique", "dedup factor")
    table = _table(f"Groups{estimate}", names, names[2:])
    for name, group in groups.items():
        factor = group["dedup_factor"]
        text = "" if factor is None else f"{factor:.2f}"
        table.add_row(name, ", ".join(group["columns"]), f"{group['num_unique']:,}", text)
    return table


def _tables_table(tables: Mapping[str, Mapping[str, Any]], estimate: str) -> Table:
    names = ("table", "features", "rows", "num_rows", "look-ups", "rows used")
    shown = _table(f"Tables, training samples{estimate}", names, names[3:])
    for name, table in tables.items():
        counts = (table[key] for key in ("num_rows", "num_lookups", "num_unique_rows"))
        features = ", ".join(table["features"])
        shown.add_row(name, features, table["rows"], *(f"{count:,}" for count in counts))
    return shown


def _splits_table(splits: Mapping[str, Mapping[str, Any]], estimate: str) -> Table:
    names = ("split", "samples", "first", "last", "label mean")
    table = _table(f"Splits{estimate}", names, ("samples", "label mean"))
    for name, split in splits.items():
        times = (str(split[key] or "") for key in ("first_time", "last_time"))
        mean = "" if split["label_mean"] is None else f"{split['label_mean']:.4f}"
        table.add_row(name, f"{split['num_samples']:,}", *times, mean)
    return table


def _joins_table(joins: Sequence[Mapping[str, Any]], estimate: str) -> Table:
    table = _table(f"Joins{estimate}", ("table", "key", "found", "of"), ("found", "of"))
    for join in joins:
        table.add_row(join["table"], join["key"], f"{join['matched']:,}", f"{join['of']:,}")
    return table
