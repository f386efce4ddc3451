"""Decode one row group of a segment to flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from presage.schemas.arrays import (
    Array,
    comparable,
    hash_keys,
    is_list,
    numpy_of,
    offsets_of,
    one_chunk,
    take_values,
    values_of,
)
from presage.schemas.config.job import DataConfig, TableConfig
from presage.schemas.config.train import ModelConfig, TrainConfig
from presage.schemas.dataset.history_windows import HistoryRows, HistorySpec, window_spec
from presage.schemas.dataset.opened import OpenDataset
from presage.schemas.errors import SchemaError, suggest_name
from presage.schemas.features import FeatureSet
from presage.schemas.layout import BLOCK, count_column, inverse_column, weights_column
from presage.schemas.rows import rows_of_values
from presage.schemas.run.model_inputs import check_lengths, check_range, scalar_values
from presage.trainer.data.batch import ListColumns

SAMPLES = "samples"
"""Owner of the columns that are stored once per sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """The columns of a batch, their dedup groups and tables."""

    label: str
    weight: str | None
    dense: tuple[str, ...]
    """Dense features, schema order."""
    sparse: tuple[str, ...]
    """Sparse features, schema order, and after them those of histories."""
    weighted: tuple[str, ...]
    """Sparse features whose list entries have weights."""
    kept: tuple[str, ...]
    """Columns that only evaluation reads: keys of samples, and times."""
    owner: Mapping[str, str]
    """Column to its dedup group; without an entry it is stored per sample."""
    tables: Mapping[str, TableConfig]
    table_of: Mapping[str, str]
    """Sparse feature to table."""
    dtype: str
    """float32 or float64, of labels, weights and dense features."""
    histories: tuple[HistorySpec, ...] = ()
    session_key: str = ""
    """Column of the keys of histories."""
    session_time: str = ""
    """Column of the times of samples, for histories."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Stored dedup groups of the columns, in order of first use."""
        return tuple(dict.fromkeys(self.owner[c] for c in self.columns if c in self.owner))

    @property
    def stored_sparse(self) -> tuple[str, ...]:
        """Sparse features without those of histories, schema order."""
        of_histories = {f for history in self.histories for f in history.features.values()}
        return tuple(f for f in self.sparse if f not in of_histories)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read, without inverse indices."""
        single = [c for c in (self.label, self.weight) if c is not None]
        weights = [weights_column(f) for f in self.weighted]
        counts = [count_column(history.name) for history in self.histories]
        keys = [self.session_key, self.session_time] if counts else []
        own = [*single, *self.kept, *self.dense, *self.stored_sparse, *weights]
        return tuple(dict.fromkeys([*own, *keys, *counts]))


def spec_of(dataset: OpenDataset, dtype: str, kept: tuple[str, ...] = ()) -> BatchSpec:
    """Return the columns of a batch of a dataset, without histories.

    Raises:
        SchemaError: a sparse feature has no table, or one of `kept` is no column.
    """
    data = dataset.job.data
    return spec_of_columns(dataset.features, data, dtype, kept, data.group_of_column)


def training_spec(
    dataset: OpenDataset, config: TrainConfig, kept: tuple[str, ...] = ()
) -> BatchSpec:
    """Return the columns of a batch of a run, with the events of `train.histories` as features.

    Raises:
        SchemaError: as `spec_of`, or the dataset lacks a history or one of its features is taken.
    """
    spec = spec_of(dataset, config.dtype, kept)
    return with_histories(spec, dataset, train_histories(dataset.job.data, config))


def train_histories(data: DataConfig, config: TrainConfig) -> list[HistorySpec]:
    """Return the histories of `train.histories`, as features.

    Raises:
        SchemaError: the dataset lacks one.
    """
    specs = [window_spec(data, name, *window) for name, window in config.windows.items()]
    model = config.model
    return [replace(s, runs=runs_of_model(model, s.name), sparse=s.columns) for s in specs]


def runs_of_model(model: ModelConfig, history: str) -> Literal["key", "start", "window"]:
    """Return which samples of a model share a run of events.

    With one causal layer what an event becomes does not depend on those before it that a sample
    does not see; with more, windows must begin at the same event.
    """
    if model.name != "hstu" or model.history != history:
        return "window"
    return "key" if model.num_layers == 1 else "start"


def with_histories(
    spec: BatchSpec, dataset: OpenDataset, histories: Sequence[HistorySpec]
) -> BatchSpec:
    """Return the columns of a batch with histories, some as features.

    Raises:
        SchemaError: a column has the name of such a feature.
    """
    data = dataset.job.data
    owner, table_of = dict(spec.owner), dict(spec.table_of)
    features: list[str] = []
    for history in histories:
        for column, feature in history.features.items():
            if feature in dataset.features:
                raise SchemaError(
                    f"column {feature!r} has the name of a column of history {history.name!r}; "
                    "rename one"
                )
            features.append(feature)
            owner[feature], table_of[feature] = history.group, history.tables[column]
    return replace(
        spec,
        sparse=(*spec.sparse, *features),
        owner=owner,
        table_of=table_of,
        histories=tuple(histories),
        session_key=data.session.key,
        session_time=data.session.time or "",
    )


def spec_of_columns(
    features: FeatureSet,
    data: DataConfig,
    dtype: str,
    kept: tuple[str, ...] = (),
    owner: Mapping[str, str] | None = None,
) -> BatchSpec:
    """Return the columns of a batch with the given features.

    Args:
        features: declared columns.
        data: tables and their features.
        dtype: float32 or float64.
        kept: further columns, for evaluation.
        owner: column to its dedup group; None if nothing is deduplicated.

    Raises:
        SchemaError: as `spec_of`.
    """
    owner = owner or {}
    sparse = features.with_role("sparse")
    for feature in sparse:
        if feature not in data.table_of_feature:
            raise SchemaError(
                f"sparse feature belongs to no table: {feature!r}; "
                f"{suggest_name(feature, data.table_of_feature)}"
            )
    if not sparse:
        raise SchemaError("schema has no sparse feature; tag one")
    for name in kept:
        features[name]  # raises SchemaError if it is no column
    return BatchSpec(
        label=features.label,
        weight=features.weight,
        dense=features.with_role("dense"),
        sparse=sparse,
        weighted=tuple(f for f in sparse if _has_weights(features, owner, f)),
        kept=kept,
        owner=owner,
        tables=data.tables,
        table_of=data.table_of_feature,
        dtype=dtype,
    )


def _has_weights(features: FeatureSet, owner: Mapping[str, str], feature: str) -> bool:
    """Return whether the entries of a list feature have weights; checks their type and group."""
    name = weights_column(feature)
    if name not in features:
        return False
    column = features[name]
    if not (column.is_list and column.type == "FLOAT" and column.role == "kept"):
        raise SchemaError(
            f"weights of list entries must be a FLOAT list of role kept, got {name!r} of type "
            f"{column.type} and role {column.role}; declare it so, or rename it"
        )
    if owner.get(name) != owner.get(feature):
        raise SchemaError(
            f"weights of list entries must be in the group of their list, got {name!r} in "
            f"{owner.get(name)} and {feature!r} in {owner.get(feature)}; declare them in one group"
        )
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """The blocks of one row group, in file order.

    Attributes:
        blocks: (num_blocks,) ids.
        samples: (num_blocks,) samples of each.
        uniques: by group, (num_blocks,) unique tuples of each.
    """

    blocks: NDArray[np.int64]
    samples: NDArray[np.int64]
    uniques: Mapping[str, NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Lists:
    """Lists that are ranges of one array, where they may overlap.

    Attributes:
        values: (num_values,).
        starts: (num_rows,) int64.
        ends: (num_rows,) int64.
    """

    values: Array
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """Values, starts and ends."""
        return self.values, self.starts, self.ends


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """A decoded row group.

    Attributes:
        sample_offsets: (num_blocks + 1,) offsets of each block's samples.
        unique_offsets: by group, (num_blocks + 1,) offsets of each block's unique tuples.
        labels: (num_samples,).
        weights: (num_samples,).
        dense: (num_samples, num_dense), nulls as 0.
        kept: by column, (num_samples,) int64: equal for equal values, times in order.
        inverse: by group, (num_samples,) int64, the tuple of each sample in the row group.
        sparse: by feature, rows of its table in the smallest type; one bag per unique tuple, or per
            sample.
        per_sample_weights: by weighted feature, the weight of each entry of these bags.
        histories: arrays of `HistoryRows` by history and field.
    """

    sample_offsets: NDArray[np.int64]
    unique_offsets: Mapping[str, NDArray[np.int64]]
    labels: Array
    weights: Array
    dense: Array
    kept: Mapping[str, NDArray[np.int64]]
    inverse: Mapping[str, NDArray[np.int64]]
    sparse: Mapping[str, Lists]
    per_sample_weights: Mapping[str, Lists]
    histories: Mapping[str, Array] = field(default_factory=dict)

    def without(self, rows: NDArray[np.int64]) -> RowGroup:
        """Return the row group with weight 0 for the samples at `rows`."""
        if not len(rows):
            return self
        weights = self.weights.copy()
        weights[rows] = 0
        return replace(self, weights=weights)

    @property
    def block_weights(self) -> NDArray[np.float64]:
        """Sum of the weights of each block, (num_blocks,)."""
        ranges = pairwise(self.sample_offsets.tolist())
        return np.array([self.weights[i:j].sum(dtype=np.float64) for i, j in ranges])

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays; shared ones count once."""
        flat = [self.labels, self.weights, self.dense, *self.kept.values(), *self.inverse.values()]
        flat += self.histories.values()
        lists = [*self.sparse.values(), *self.per_sample_weights.values()]
        arrays = map(whole_array, [*flat, *(x for each in lists for x in each.arrays)])
        return sum({x.ctypes.data: x.nbytes for x in arrays}.values())

    @cached_property
    def list_columns(self) -> ListColumns:
        """The bags of each stored feature and their weights, checked."""
        return self.list_columns_with(())

    def list_columns_with(self, others: Iterable[tuple[Array, Array, Array]]) -> ListColumns:
        """Return the bags of each stored feature, and those of others, without weights."""
        weights, lists = self.per_sample_weights, [each.arrays for each in self.sparse.values()]
        of_stored = [weights[f].arrays if f in weights else None for f in self.sparse]
        lists += others
        return ListColumns(lists, of_stored + [None] * (len(lists) - len(of_stored)))


def whole_array(array: Array) -> Array:
    """Return the offsets that an array of starts or ends is a view of, or the array itself."""
    base = array.base
    if isinstance(base, np.ndarray) and base.flags.c_contiguous and base.ndim == 1:
        return base if base.size <= array.size + 1 else array
    return array


def padding_row_group(spec: BatchSpec, num_samples: int) -> RowGroup:
    """Return one block of samples with weight 0, label 0, no look-ups and dense features 0.

    Args:
        spec: columns of the samples.
        num_samples: of the block; they share one tuple of each group. None without samples.
    """
    num_unique = min(num_samples, 1)
    zeros = np.zeros(num_samples, spec.dtype)
    bags = {f: num_unique if f in spec.owner else num_samples for f in spec.stored_sparse}

    def empty(count: int, dtype: DTypeLike) -> Lists:
        return Lists(np.empty(0, dtype), *np.zeros((2, count), np.int64))

    return RowGroup(
        sample_offsets=np.array([0, num_samples]),
        unique_offsets={group: np.array([0, num_unique]) for group in spec.groups},
        labels=zeros,
        weights=zeros,
        dense=np.zeros((num_samples, len(spec.dense)), spec.dtype),
        kept={name: np.zeros(num_samples, np.int64) for name in spec.kept},
        inverse={group: np.zeros(num_samples, np.int64) for group in spec.groups},
        sparse={f: empty(count, np.int64) for f, count in bags.items()},
        per_sample_weights={f: empty(bags[f], spec.dtype) for f in spec.weighted},
    )


ReadTable = Callable[[str, list[str]], pa.Table]
"""(`samples` or a group, columns) to the row group's columns."""


JoinHistory = Callable[[HistorySpec, pa.Array, pa.Array, NDArray[np.int64]], HistoryRows]
"""History, session keys and times of samples and their counts to the events that these see."""


def decode(
    spec: BatchSpec, counts: BlockCounts, read: ReadTable, join: JoinHistory | None = None
) -> RowGroup:
    """Decode one row group.

    `join` is called for each history.

    Raises:
        SchemaError: the files and `blocks.parquet` disagree, or a column does not fit its role.
    """
    inverse_of = {group: inverse_column(group) for group in spec.groups}
    tables = {
        owner: read(
            owner,
            [
                BLOCK,
                *(c for c in spec.columns if spec.owner.get(c, SAMPLES) == owner),
                *(inverse_of.values() if owner == SAMPLES else ()),
            ],
        )
        for owner in (SAMPLES, *spec.groups)
    }
    _check_blocks(tables[SAMPLES], counts.blocks, counts.samples, SAMPLES)
    for group in spec.groups:
        _check_blocks(tables[group], counts.blocks, counts.uniques[group], group)
    inverse = {
        group: _inverse(tables[SAMPLES][column], counts, group)
        for group, column in inverse_of.items()
    }

    def column_of(name: str) -> pa.Array:
        return one_chunk(tables[spec.owner.get(name, SAMPLES)][name])

    def per_sample(name: str, to_array: Callable[[pa.Array], Array]) -> Array:
        values = to_array(column_of(name))
        return values[inverse[spec.owner[name]]] if name in spec.owner else values

    def per_sample_column(name: str) -> pa.Array:
        column = column_of(name)
        return take_values(column, inverse[spec.owner[name]]) if name in spec.owner else column

    def numbers(name: str, low: float = -np.inf, high: float = np.inf) -> Array:
        values = per_sample(name, lambda column: scalar_values(column, spec.dtype))
        return check_range(values, name, low, high)

    num_samples = int(counts.samples.sum())
    sparse = {n: _bags(column_of(n), spec.table_of[n], spec) for n in spec.stored_sparse}
    dense = np.empty((num_samples, len(spec.dense)), spec.dtype)
    for index, name in enumerate(spec.dense):
        dense[:, index] = numbers(name)
    return RowGroup(
        sample_offsets=offsets_of(counts.samples),
        unique_offsets={g: offsets_of(counts.uniques[g]) for g in spec.groups},
        labels=numbers(spec.label, 0.0, 1.0),
        weights=(
            np.ones(num_samples, spec.dtype) if spec.weight is None else numbers(spec.weight, 0.0)
        ),
        dense=dense,
        kept={name: per_sample(name, _keys) for name in spec.kept},
        inverse=inverse,
        sparse=sparse,
        per_sample_weights={
            f: _entry_weights(column_of(weights_column(f)), f, sparse[f], spec.dtype)
            for f in spec.weighted
        },
        histories=_histories(spec, per_sample_column, join),
    )


def _histories(
    spec: BatchSpec, column_of: Callable[[str], pa.Array], join: JoinHistory | None
) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for history in spec.histories:
        assert join is not None, "needed for histories"
        of_samples = numpy_of(column_of(count_column(history.name))).astype(np.int64)
        keys, times = column_of(spec.session_key), column_of(spec.session_time)
        arrays |= join(history, keys, times, of_samples).arrays(history.name)
    return arrays


def _check_blocks(
    table: pa.Table, blocks: NDArray[np.int64], rows: NDArray[np.int64], name: str
) -> None:
    block_of_row = table[BLOCK].to_numpy()
    if not np.array_equal(block_of_row, np.repeat(blocks, rows)):
        raise SchemaError(
            f"row group of {name} does not match blocks.parquet: {len(block_of_row)} rows where it "
            f"lists {rows.sum()}, or another order; rebuild the dataset"
        )


def _inverse(column: pa.ChunkedArray, counts: BlockCounts, group: str) -> NDArray[np.int64]:
    """Return inverse indices relative to the row group's first tuple instead of the block's."""
    inverse = numpy_of(column).astype(np.int64)
    uniques = counts.uniques[group]
    if np.any((inverse < 0) | (inverse >= np.repeat(uniques, counts.samples))):
        raise SchemaError(
            f"inverse_indices of {group} must be in [0, unique tuples of their block), got up to "
            f"{inverse.max()}; rebuild the dataset"
        )
    return inverse + np.repeat(offsets_of(uniques)[:-1], counts.samples)


def _bags(column: pa.Array, table: str, spec: BatchSpec) -> Lists:
    """Return the rows of each value of a sparse feature; nulls are empty bags."""
    config = spec.tables[table]
    dtype = np.min_scalar_type(config.num_rows - 1)
    return _lists(column, lambda values: rows_of_values(values, table, config).astype(dtype))


def _entry_weights(column: pa.Array, feature: str, bags: Lists, dtype: str) -> Lists:
    """Return the weight of each entry of a list feature."""
    name = weights_column(feature)
    weights = _lists(
        column, lambda values: check_range(numpy_of(values).astype(dtype), name, -np.inf, np.inf)
    )
    check_lengths(name, weights.ends - weights.starts, feature, bags.ends - bags.starts)
    return weights


def _lists(column: pa.Array, to_array: Callable[[pa.Array], Array]) -> Lists:
    """Return lists, or single values, whose values are converted once."""
    if pa.types.is_large_list_view(column.type):
        starts = numpy_of(column.offsets)
        return Lists(to_array(column.values), starts, starts + numpy_of(column.sizes))
    if not is_list(column.type) and not column.null_count:
        values, offsets = column, _one_each(len(column))
    else:
        values, offsets = values_of(column)
    return Lists(to_array(values), offsets[:-1], offsets[1:])


@lru_cache(maxsize=8)
def _one_each(num_rows: int) -> NDArray[np.int64]:
    """Return the offsets of rows with one value each, which features of a row group share."""
    offsets = np.arange(num_rows + 1)
    offsets.flags.writeable = False
    return offsets


def _keys(column: pa.Array) -> Array:
    """Return int64 values that are equal iff the keys are; null is a key."""
    if not column.null_count:
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.int64())
        if pa.types.is_integer(column.type):
            return numpy_of(column).astype(np.int64)
        if pa.types.is_dictionary(column.type):  # strings: each distinct one is hashed once
            return _keys(column.dictionary)[numpy_of(column.indices)]
    return hash_keys(comparable(column)).view(np.int64)
