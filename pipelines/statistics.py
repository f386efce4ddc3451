"""Statistics of every column as tensorflow-metadata protos, from aggregates that add up exactly.

Sums of numbers are exact (fractions), so that neither the order of rows nor
the order of parts nor the machine changes a byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import sqrt

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf import text_format
from tensorflow_metadata.proto.v0 import anomalies_pb2, statistics_pb2

from pipelines.exact_sum import exact_sum, exact_sum_of_squares
from schemas.columns import is_list, numpy_of, one_chunk


@dataclass(frozen=True, slots=True)
class ColumnStatistics:
    """Sums over the rows of one column; `a + b` is the statistics of both.

    Attributes:
        kind: INT, FLOAT or STRING.
        num_rows: rows seen: samples, or unique tuples of a group.
        num_missing: nulls among them.
        num_values: finite values, list elements counted one by one; texts by their length.
        num_zeros: values equal to zero.
        num_nan: values that are not a number, or infinite.
        minimum: smallest value.
        maximum: largest value.
        total: exact sum of values.
        total_squares: exact sum of squares.
        min_values: fewest values of a row.
        max_values: most values of a row.
    """

    kind: str
    num_rows: int
    num_missing: int
    num_values: int
    num_zeros: int
    num_nan: int
    minimum: float
    maximum: float
    total: Fraction
    total_squares: Fraction
    min_values: int
    max_values: int

    @property
    def num_present(self) -> int:
        """Rows that have a value or a list."""
        return self.num_rows - self.num_missing

    def __add__(self, other: ColumnStatistics) -> ColumnStatistics:
        """Add the sums of two sets of rows."""
        return ColumnStatistics(
            self.kind,
            self.num_rows + other.num_rows,
            self.num_missing + other.num_missing,
            self.num_values + other.num_values,
            self.num_zeros + other.num_zeros,
            self.num_nan + other.num_nan,
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
            self.total + other.total,
            self.total_squares + other.total_squares,
            min((s.min_values for s in (self, other) if s.num_present), default=0),
            max(self.max_values, other.max_values),
        )


def column_statistics(column: pa.Array | pa.ChunkedArray) -> ColumnStatistics:
    """Return the sums over one column."""
    array = one_chunk(column)
    present = pc.drop_null(array)
    lengths = np.ones(len(present), np.int64)
    kind, values = "STRING", np.empty(0)
    if is_list(array.type):
        lengths = pc.list_value_length(present).to_numpy().astype(np.int64)
        present = present.flatten()
    if pa.types.is_string(present.type) or pa.types.is_large_string(present.type):
        values = pc.binary_length(present).to_numpy().astype(np.int64)
    else:
        kind = "FLOAT" if pa.types.is_floating(present.type) else "INT"
        values = numpy_of(present)
    finite = values[np.isfinite(values)] if kind == "FLOAT" else values
    return ColumnStatistics(
        kind,
        len(array),
        array.null_count,
        len(finite),
        int((finite == 0).sum()),
        len(values) - len(finite),
        float(finite.min()) if len(finite) else float("inf"),
        float(finite.max()) if len(finite) else float("-inf"),
        exact_sum(finite),
        exact_sum_of_squares(finite),
        int(lengths.min()) if len(lengths) else 0,
        int(lengths.max()) if len(lengths) else 0,
    )


def table_statistics(table: pa.Table, skip: Iterable[str] = ()) -> dict[str, ColumnStatistics]:
    """Return the sums over each column of a table but those to skip."""
    return {c: column_statistics(table[c]) for c in table.column_names if c not in set(skip)}


def merge(
    left: Mapping[str, ColumnStatistics], right: Mapping[str, ColumnStatistics]
) -> dict[str, ColumnStatistics]:
    """Add the statistics of two parts, column by column."""
    both = {c: left[c] + right[c] for c in left if c in right}
    return {**left, **right, **both}


def statistics_text(columns: Mapping[str, ColumnStatistics], num_samples: int) -> str:
    """Return statistics as the text of a DatasetFeatureStatisticsList, features in name order."""
    proto = statistics_pb2.DatasetFeatureStatisticsList()
    dataset = proto.datasets.add(name="segment", num_examples=num_samples)
    for name in sorted(columns):
        _fill(dataset.features.add(), name, columns[name])
    return text_format.MessageToString(proto)


def _fill(
    feature: statistics_pb2.FeatureNameStatistics, name: str, column: ColumnStatistics
) -> None:
    kinds = statistics_pb2.FeatureNameStatistics
    feature.path.step.append(name)
    feature.type = getattr(kinds, column.kind)
    mean = float(column.total / column.num_values) if column.num_values else 0.0
    if column.kind == "STRING":
        feature.string_stats.avg_length = mean
        common = feature.string_stats.common_stats
    else:
        numbers = feature.num_stats
        common = numbers.common_stats
        numbers.mean = mean
        numbers.num_zeros = column.num_zeros
        if column.num_values:
            variance = (
                column.total_squares / column.num_values - (column.total / column.num_values) ** 2
            )
            numbers.std_dev = sqrt(float(max(Fraction(0), variance)))
            numbers.min, numbers.max = column.minimum, column.maximum
        if column.num_nan:
            numbers.histograms.add(num_nan=column.num_nan)
    common.num_non_missing = column.num_present
    common.num_missing = column.num_missing
    common.min_num_values = column.min_values
    common.max_num_values = column.max_values
    common.tot_num_values = column.num_values + column.num_nan
    if column.num_present:
        common.avg_num_values = common.tot_num_values / column.num_present


def anomalies_text(reasons: Mapping[str, int]) -> str:
    """Return the reasons of rejects as the text of an Anomalies proto.

    Args:
        reasons: reason to number of rows, over all rejects of the segment.
    """
    proto = anomalies_pb2.Anomalies()
    for reason in sorted(reasons):
        info = proto.anomaly_info[reason]
        info.severity = anomalies_pb2.AnomalyInfo.ERROR
        info.short_description = reason
        info.description = f"{reasons[reason]} rows were rejected"
    return text_format.MessageToString(proto)
