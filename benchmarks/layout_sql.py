"""Plain SQL over each layout with DuckDB, and the same query in Polars."""

from collections.abc import Mapping
from pathlib import Path

import duckdb
import polars as pl

GROUP_COLUMN = {"mind": "user_id", "demo": "user_country"}


def samples_query(layout: str, paths: Mapping[str, Path], groups: list[str], key: str) -> str:
    """Return the SQL of the mean label by a sample column."""
    if layout == "star":
        return f"select {key} k, avg(label) from read_parquet('{paths['samples']}') group by 1"
    return f"select s.{key} k, avg(s.label) from ({_nested(layout, paths, groups)}) group by 1"


def _nested(layout: str, paths: Mapping[str, Path], groups: list[str], kept: str = "") -> str:
    relation = f"read_parquet('{paths['nested']}')"
    if layout == "block_rows":
        return f"select block, unnest(samples) s from {relation}"
    kept = kept and kept + ", "
    parent = ""
    for child in [*groups[1:], "samples"]:
        relation = f"(select {kept}unnest({parent}{child}) s from {relation})"
        parent = "s."
    return f"select * from {relation}"


def join_query(layout: str, paths: Mapping[str, Path], groups: list[str], key: str) -> str:
    """Return the SQL of the mean label by a column of the coarsest group."""
    group = groups[0]
    if layout == "star":
        return (
            f"select g.{key} k, avg(s.label) from read_parquet('{paths['samples']}') s "
            f"join read_parquet('{paths[group]}') g "
            f"on s.block = g.block and s.{group}_inverse = g.unique_index group by 1"
        )
    if layout == "block_rows":
        return (
            f"select g.{key} k, avg(s.label) from ({_nested(layout, paths, groups)}) n "
            f'join (select block, unnest("{group}") g, generate_subscripts("{group}", 1) - 1 i '
            f"from read_parquet('{paths['nested']}')) u "
            f"on n.block = u.block and n.s.{group}_inverse = u.i group by 1"
        )
    return f"select {key} k, avg(s.label) from ({_nested(layout, paths, groups, key)}) group by 1"


def run_duckdb(query: str) -> tuple[dict[int, float], int]:
    """Run a query on two threads; return the groups and the bytes read by system calls."""
    with duckdb.connect(config={"threads": 2, "enable_external_file_cache": False}) as connection:
        before = _bytes_read()
        rows = connection.execute(query).fetchall()
        return {int(k): round(v, 9) for k, v in rows}, _bytes_read() - before


def _bytes_read() -> int:
    line = Path("/proc/self/io").read_text(encoding="ascii").splitlines()[0]
    return int(line.removeprefix("rchar:"))


def run_polars(layout: str, paths: Mapping[str, Path], groups: list[str], key: str):
    """Run the query of the sample column in Polars; return the groups."""
    if layout == "star":
        frame = pl.scan_parquet(paths["samples"])
    else:
        frame = pl.scan_parquet(paths["nested"])
        for name in ["samples"] if layout == "block_rows" else [*groups[1:], "samples"]:
            frame = frame.select(name).explode(name).unnest(name)
    rows = frame.group_by(key).agg(pl.col("label").mean()).collect()
    return dict(zip(rows[key].to_list(), rows["label"].round(9).to_list(), strict=True))
