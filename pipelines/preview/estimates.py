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
"""Share of rejects that is said."""


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Samples as SQL gave them, in the order of their raw rows.

    Attributes:
        rows: the columns that the schema declares, but for those that transforms make.
        is_evaluation: (num_samples,) bool.
    """

    rows: pa.Table
    is_evaluation: np.ndarray

    @staticmethod
    def of(tuples: Sequence[Tuples], context: BuildContext) -> SampleTable:
        """Put the columns of samples together again."""
        names = [n for n in context.features.names if n not in context.data.derived_columns]
        if not tuples:
            empty = pa.table({n: pa.array([], pa.null()) for n in names})
            return SampleTable(empty, np.zeros(0, bool))
        every = [*names, ORIGIN, LIST_INDEX]
        found = pa.concat_tables(pa.table({n: t.column(n) for n in every}) for t in tuples)
        unused_events = np.concatenate([in_evaluation(t, context.data) for t in tuples])
        order = np.lexsort([found[LIST_INDEX].to_numpy(), found[ORIGIN].to_numpy()])
        return SampleTable(found.select(names).take(pa.array(order)), unused_events[order])


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
        samples: all of them.
        parts: what was written of them.
        distinct: table to rows that are looked up.
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
        "joins": [*_look_ups(context, samples, rows), *_sources_of_a_key(context, rows)],
    }


def _splits(context: BuildContext, samples: SampleTable) -> dict[str, Any]:
    names = (TRAIN, EVALUATION) if context.data.split.evaluation_from else (TRAIN,)
    found: dict[str, Any] = {}
    for name in names:
        mine = samples.rows.filter(pa.array(samples.is_evaluation == (name == EVALUATION)))
        times = pc.min_max(mine[context.data.session.time])
        labels = [n for n in context.features.with_role("label") if n in mine.column_names]
        mean = pc.mean(mine[labels[0]].cast(pa.float64())).as_py() if labels and len(mine) else None
        found[name] = {
            "num_samples": mine.num_rows,
            "first_time": _plain(times["min"].as_py()),
            "last_time": _plain(times["max"].as_py()),
            "label_mean": None if mean is None else round(float(mean), 6),
        }
    return found


def _look_ups(
    context: BuildContext, samples: SampleTable, rows: Mapping[str, Sequence[pa.Table]]
) -> list[dict[str, Any]]:
    """Return how many samples have a key that a side table has, for each look-up."""
    found: list[dict[str, Any]] = []
    for join in context.data.samples.joins:
        config, kind = context.data.sides[join.side], context.key_types[join.side]
        asked = join.key or config.key
        known = [key_column(table, config.key, kind) for table in rows.get(join.side, [])]
        matched = 0
        if known and samples.rows.num_rows:
            keys = key_column(samples.rows, asked, kind)
            values = pa.concat_arrays([one_chunk(pa.chunked_array([k])) for k in known])
            matched = pc.sum(pc.is_in(keys, value_set=values.drop_null())).as_py() or 0
        found.append(
            {"table": join.side, "key": asked, "of": samples.rows.num_rows, "matched": matched}
        )
    return found


def _sources_of_a_key(
    context: BuildContext, rows: Mapping[str, Sequence[pa.Table]]
) -> list[dict[str, Any]]:
    """Return how many rows of the sample source have their key in each other source."""
    data, key = context.data, context.shard
    if key is None:
        return []
    kind = key_type({name: context.empty_rows[name] for name in data.sources}, key)
    keys = [key_column(table, key, kind) for table in rows.get(data.sample_source, [])]
    found: list[dict[str, Any]] = []
    for name in data.sources:
        if name == data.sample_source:
            continue
        known = [key_column(table, key, kind) for table in rows.get(name, [])]
        matched = 0
        if known and keys:
            values = pa.concat_arrays(known).drop_null()
            matched = sum(pc.sum(pc.is_in(k, value_set=values)).as_py() or 0 for k in keys)
        found.append({"table": name, "key": key, "of": sum(map(len, keys)), "matched": matched})
    return found


def notes_of(
    context: BuildContext,
    sources: Mapping[str, Mapping[str, Any]],
    samples: SampleTable,
    rejects: Mapping[str, Any],
    made: Mapping[str, Any],
) -> list[str]:
    """Return what a person should know before they build, one line each."""
    data, notes = context.data, list[str]()
    source, num_samples = sources[data.sample_source], samples.rows.num_rows
    whole = all(each["whole"] for each in sources.values())
    if not whole:
        notes.append(
            f"groups, tables, splits and joins are estimates from the first {source['rows_read']} "
            f"rows of {data.sample_source!r}; --rows N looks at more"
        )
    if rejects["share"] > MANY_REJECTS:
        notes.append(
            f"{rejects['share']:.1%} of the rows that samples are made from cannot be used"
        )
    for join in made["joins"]:
        read = sources[join["table"]]
        if join["of"] > join["matched"] and (not join["matched"] or not read["whole"]):
            found = f"only {join['matched']}" if join["matched"] else "none"
            part = "all" if read["whole"] else "the first"
            notes.append(
                f"{found} of {join['of']} samples find their {join['key']!r} in {part} "
                f"{read['rows_read']} rows of {join['table']!r}"
                + ("" if read["whole"] else "; others may follow")
            )
    notes.extend(_split_notes(context, made["splits"], num_samples, whole))
    if num_samples:
        factors = {name: group["dedup_factor"] for name, group in made["groups"].items()}
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
    rest = "" if whole else "; later rows may lie there"
    if not splits[EVALUATION]["num_samples"]:
        last = splits[TRAIN]["last_time"]
        return [f"no sample is for evaluation: the last one, {last}, is before {start}{rest}"]
    if not splits[TRAIN]["num_samples"]:
        first = splits[EVALUATION]["first_time"]
        return [f"no sample is for training: the first one, {first}, is not before {start}{rest}"]
    return []


def python_values(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows as JSON has them: times as text, numbers that are none as null."""
    return [{k: _plain(v) for k, v in row.items()} for row in python_rows(table)]


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, float) and not isfinite(value):
        return None
    return [_plain(v) for v in value] if isinstance(value, list) else value
