"""Estimates from the first samples of a log: groups, tables, splits and look-ups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.build import group_warnings, label_warnings
from pipelines.clustering.part import PartResult
from pipelines.context import BuildContext
from pipelines.samples.lookups import key_column, key_type
from pipelines.samples.sampling import in_evaluation
from pipelines.samples.sql import LIST_INDEX
from pipelines.samples.tuples import Tuples
from pipelines.sources.rejects import python_rows
from pipelines.sources.rows import ORIGIN
from pipelines.table.commit import group_counts
from schemas.arrays import is_list, one_chunk
from schemas.layout import EVALUATION, TRAIN

MANY_REJECTS = 0.01
"""Share of rejects above which a note reports them."""


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Samples of the SQL, in the order of their raw rows.

    Attributes:
        rows: the declared columns, without those that transforms make.
        is_evaluation: (num_samples,) bool.
    """

    rows: pa.Table
    is_evaluation: np.ndarray

    @staticmethod
    def of(tuples: Sequence[Tuples], context: BuildContext) -> SampleTable:
        """Join the columns of tuples back to the samples."""
        names = [n for n in context.features.names if n not in context.data.derived_columns]
        if not tuples:
            empty = pa.table({n: pa.array([], pa.null()) for n in names})
            return SampleTable(empty, np.zeros(0, bool))
        columns = [*names, ORIGIN, LIST_INDEX]
        rows = pa.concat_tables(pa.table({n: t.column(n) for n in columns}) for t in tuples)
        is_evaluation = np.concatenate([in_evaluation(t, context.data) for t in tuples])
        order = np.lexsort([rows[LIST_INDEX].to_numpy(), rows[ORIGIN].to_numpy()])
        return SampleTable(rows.select(names).take(pa.array(order)), is_evaluation[order])


def estimates(
    context: BuildContext,
    samples: SampleTable,
    parts: Sequence[PartResult],
    distinct: Mapping[str, int],
    rows: Mapping[str, Sequence[pa.Table]],
) -> dict[str, Any]:
    """Return groups, tables, splits and look-ups of the first samples.

    Args:
        context: of the build.
        samples: the first samples.
        parts: results of their parts.
        distinct: table to number of distinct rows.
        rows: raw rows by source and side table.
    """
    data = context.data
    counts = group_counts(parts) if parts else {}
    return {
        "groups": {
            name: {
                "columns": list(columns),
                "num_unique": counts[name].num_unique if name in counts else 0,
                "dedup_factor": counts[name].dedup_factor if name in counts else None,
            }
            for name, columns in data.groups.items()
        },
        "tables": {
            name: {
                "features": list(table.features),
                "rows": table.rows,
                "num_rows": table.num_rows,
                "num_lookups": sum(part.lookups.get(name, (0, 0))[0] for part in parts),
                "num_unique_rows": distinct.get(name, 0),
            }
            for name, table in data.tables.items()
        },
        "splits": _splits(context, samples),
        "joins": [*_look_ups(context, samples, rows), *_keyed_sources(context, rows)],
    }


def _splits(context: BuildContext, samples: SampleTable) -> dict[str, Any]:
    names = (TRAIN, EVALUATION) if context.data.split.evaluation_from else (TRAIN,)
    splits: dict[str, Any] = {}
    for name in names:
        rows = samples.rows.filter(pa.array(samples.is_evaluation == (name == EVALUATION)))
        times = pc.min_max(rows[context.data.session.time])
        labels = [n for n in context.features.with_role("label") if n in rows.column_names]
        mean = pc.mean(rows[labels[0]].cast(pa.float64())).as_py() if labels and len(rows) else None
        splits[name] = {
            "num_samples": rows.num_rows,
            "first_time": _plain(times["min"].as_py()),
            "last_time": _plain(times["max"].as_py()),
            "label_mean": None if mean is None else round(float(mean), 6),
        }
    return splits


def _look_ups(
    context: BuildContext, samples: SampleTable, rows: Mapping[str, Sequence[pa.Table]]
) -> list[dict[str, Any]]:
    """Return the number of samples whose key is in the side table, for each look-up."""
    look_ups: list[dict[str, Any]] = []
    for join in context.data.samples.joins:
        config, kind = context.data.sides[join.side], context.key_types[join.side]
        key = join.key or config.key
        side_keys = [key_column(table, config.key, kind) for table in rows.get(join.side, [])]
        matched = 0
        if side_keys and samples.rows.num_rows:
            keys = key_column(samples.rows, key, kind)
            values = pa.concat_arrays([one_chunk(pa.chunked_array([k])) for k in side_keys])
            matched = pc.sum(pc.is_in(keys, value_set=values.drop_null())).as_py() or 0
        look_ups.append(
            {"table": join.side, "key": key, "of": samples.rows.num_rows, "matched": matched}
        )
    return look_ups


def _keyed_sources(
    context: BuildContext, rows: Mapping[str, Sequence[pa.Table]]
) -> list[dict[str, Any]]:
    """Return the number of rows of the sample source whose key is in each other source."""
    data, key = context.data, context.shard
    if key is None:
        return []
    kind = key_type({name: context.empty_rows[name] for name in data.sources}, key)
    keys = [key_column(table, key, kind) for table in rows.get(data.sample_source, [])]
    matches: list[dict[str, Any]] = []
    for name in data.sources:
        if name == data.sample_source:
            continue
        other_keys = [key_column(table, key, kind) for table in rows.get(name, [])]
        matched = 0
        if other_keys and keys:
            values = pa.concat_arrays(other_keys).drop_null()
            matched = sum(pc.sum(pc.is_in(k, value_set=values)).as_py() or 0 for k in keys)
        matches.append({"table": name, "key": key, "of": sum(map(len, keys)), "matched": matched})
    return matches


def notes_of(
    context: BuildContext,
    sources: Mapping[str, Mapping[str, Any]],
    samples: SampleTable,
    rejects: Mapping[str, Any],
    figures: Mapping[str, Any],
) -> list[str]:
    """Return notes on the result, one line each."""
    data, notes = context.data, list[str]()
    source, num_samples = sources[data.sample_source], samples.rows.num_rows
    whole = all(each["whole"] for each in sources.values())
    if not whole:
        notes.append(
            f"groups, tables, splits and joins are estimates from the first {source['rows_read']} "
            f"rows of {data.sample_source!r}; --rows N reads more"
        )
    if rejects["share"] > MANY_REJECTS:
        notes.append(f"{rejects['share']:.1%} of the rows that samples are made from are rejected")
    for join in figures["joins"]:
        read = sources[join["table"]]
        if join["of"] > join["matched"] and (not join["matched"] or not read["whole"]):
            count = f"only {join['matched']}" if join["matched"] else "none"
            part = "all" if read["whole"] else "the first"
            notes.append(
                f"{count} of {join['of']} samples have their {join['key']!r} in {part} "
                f"{read['rows_read']} rows of {join['table']!r}"
                + ("" if read["whole"] else "; others may follow")
            )
    notes.extend(_split_notes(context, figures["splits"], num_samples, whole))
    if num_samples:
        factors = {name: group["dedup_factor"] for name, group in figures["groups"].items()}
        notes.extend(group_warnings(factors, data.groups, context.segment_root))
    labels = context.features.with_role("label")
    extremes = None
    if len(labels) == 1 and pc.count(samples.rows[labels[0]]).as_py() > 1:
        least, greatest = pc.min_max(samples.rows[labels[0]]).as_py().values()
        extremes = (least, greatest)
    notes.extend(label_warnings(labels, extremes))
    for name in samples.rows.column_names if num_samples else ():
        column = one_chunk(samples.rows[name])
        if column.null_count == num_samples:
            notes.append(f"column {name!r} is null in every sample")
        elif is_list(column.type) and not len(column.flatten()):
            notes.append(f"column {name!r} is empty in every sample")
    return notes


def _split_notes(
    context: BuildContext, splits: Mapping[str, Any], num_samples: int, whole: bool
) -> list[str]:
    start = context.data.split.evaluation_from
    if start is None or not num_samples:
        return []
    rest = "" if whole else "; later rows may be there"
    if not splits[EVALUATION]["num_samples"]:
        last = splits[TRAIN]["last_time"]
        return [f"no sample is for evaluation: the last one, {last}, is before {start}{rest}"]
    if not splits[TRAIN]["num_samples"]:
        first = splits[EVALUATION]["first_time"]
        return [f"no sample is for training: the first one, {first}, is not before {start}{rest}"]
    return []


def python_values(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows as JSON values: times as text, NaN and infinity as null."""
    return [{k: _plain(v) for k, v in row.items()} for row in python_rows(table)]


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, float) and not isfinite(value):
        return None
    return [_plain(v) for v in value] if isinstance(value, list) else value
