"""Batches as tensors, deduplicated or expanded; microbatches; look-ups of any KeyedJaggedTensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from presage.schemas.arrays import Array, find_sorted, offsets_of
from presage.schemas.config.train import ModelConfig
from presage.schemas.dataset.history_windows import (
    HistoryRows,
    HistoryRuns,
    HistorySpec,
    find_runs,
)
from presage.schemas.dataset.order import Step
from presage.trainer.data import batch as kernels
from presage.trainer.data.attention_layout import HistoryLayout, lay_out_histories
from presage.trainer.data.decode import BatchSpec, RowGroup
from presage.trainer.data.history_batch import HistoryBatch, concat_histories
from presage.trainer.data.lookup import (
    Inverse,
    KeyedBags,
    TableLookup,
    VectorLayout,
    inverse_of,
    merge_lookups,
    table_lookups,
    vector_layout,
)
from presage.trainer.data.shared import SharedFeatures, find_dense_group, find_shared_features
from presage.trainer.data.transfer import to_device


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """What a batch on a device has besides its tensors.

    Asking a device how large something is waits for all its work; these were found in host memory.

    Attributes:
        lookups: of all tables as one.
        dense_group: dedup group whose tuples determine the dense features, or None.
        history: layout of target attention, None for other models.
        row_numbers: (num_rows,) int32, its rows among those of the step, all tables one after the
            other; None: all, in order.
    """

    lookups: TableLookup
    dense_group: str | None
    history: HistoryLayout | None
    row_numbers: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollatedBatch:
    """The samples of one step.

    Attributes:
        step: blocks of the batch.
        num_samples: B.
        labels: (B,).
        weights: (B,), ones if samples have no weight.
        dense: (B, num_dense), in schema order, nulls as 0.
        sparse: rows of tables, a key per sparse feature in schema order; deduplicated: one bag per
            unique tuple and inverse indices; expanded: one bag per sample.
        lookups: by table, the distinct rows of the step and the vectors that read them; empty if
            not requested.
        groups: by dedup group, its inverse; empty if expanded or without look-ups.
        group_of: by sparse feature, its dedup group or None.
        shared: features that samples share; None if not requested or nothing is deduplicated.
        kept: by column of `BatchSpec.kept`, (B,) int64: keys and times of samples.
        device_inputs: of a batch on a device, whose `sparse` and `lookups` are in host memory.
        histories: by name, the events that its samples see.
    """

    step: Step
    num_samples: int
    labels: torch.Tensor
    weights: torch.Tensor
    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    lookups: Mapping[str, TableLookup]
    groups: Mapping[str, Inverse]
    group_of: Mapping[str, str | None]
    shared: SharedFeatures | None = None
    kept: Mapping[str, Array] = field(default_factory=dict)
    device_inputs: DeviceInputs | None = None
    histories: Mapping[str, HistoryBatch] = field(default_factory=dict)

    @property
    def layout(self) -> VectorLayout:
        """Layout of pooled vectors; the indices in `lookups` refer to it."""
        return vector_layout(self.group_of, num_tuples(self.groups), self.num_samples)

    @property
    def dense_features(self) -> torch.Tensor:
        """`dense`, under the name of TorchRec's batches."""
        return self.dense

    @property
    def sparse_features(self) -> KeyedJaggedTensor:
        """`sparse`, under the name of TorchRec's batches."""
        return self.sparse

    def inverse_of(self, feature: str) -> torch.Tensor:
        """Return (B,) int64, the index of each sample's bag of `feature`."""
        group = self.group_of[feature]
        if group is None:
            return torch.arange(self.num_samples, device=self.labels.device)
        return self.groups[group].indices


_NO_SPARSE = KeyedJaggedTensor.empty()
"""`sparse` of the batch that a KeyedJaggedTensor carries."""


def num_tuples(groups: Mapping[str, Inverse]) -> dict[str, int]:
    """Return the number of distinct tuples of each group."""
    return {group: inverse.num_unique for group, inverse in groups.items()}


@dataclass(frozen=True, slots=True)
class RowGroupBlocks:
    """Blocks `start` to `end` of a row group."""

    row_group: RowGroup
    start: int
    end: int

    @property
    def samples(self) -> slice:
        """Samples of these blocks within the row group."""
        offsets = self.row_group.sample_offsets
        return slice(int(offsets[self.start]), int(offsets[self.end]))

    def tuples(self, group: str) -> tuple[NDArray[np.int64] | None, slice]:
        """Return indices of tuples, None for all of the row group, and the range of them."""
        offsets = self.row_group.unique_offsets[group]
        return None, slice(int(offsets[self.start]), int(offsets[self.end]))

    def inverse(self, group: str) -> NDArray[np.int64]:
        """Return (num_samples,) the index of each sample's tuple among those of these blocks."""
        first = self.row_group.unique_offsets[group][self.start]
        return self.row_group.inverse[group][self.samples] - first


@dataclass(frozen=True, slots=True)
class PartOfBlock:
    """Samples `first` to `end` of a block, with the tuples that they have."""

    row_group: RowGroup
    block: int
    first: int
    end: int

    @property
    def samples(self) -> slice:
        """These samples within the row group."""
        start = int(self.row_group.sample_offsets[self.block])
        return slice(start + self.first, start + self.end)

    def tuples(self, group: str) -> tuple[NDArray[np.int64] | None, slice]:
        """Return the indices of their tuples within the row group, ascending."""
        indices = np.unique(self.row_group.inverse[group][self.samples])
        return indices, slice(0, len(indices))

    def inverse(self, group: str) -> NDArray[np.int64]:
        """Return (num_samples,) the index of each sample's tuple among theirs."""
        return np.unique(self.row_group.inverse[group][self.samples], return_inverse=True)[1]


Range = RowGroupBlocks | PartOfBlock


def collate(
    spec: BatchSpec,
    step: Step,
    ranges: Sequence[Range],
    *,
    expanded: bool,
    find_shared: bool = False,
    lookups: bool = True,
) -> CollatedBatch:
    """Return the batch of some blocks.

    Args:
        spec: columns of the batch.
        step: blocks of the batch.
        ranges: their samples, in batch order.
        expanded: one bag per sample instead of one per unique tuple.
        find_shared: set `CollatedBatch.shared`; needs `lookups`.
        lookups: set `lookups` and `groups` of the batch, for our collections; they take most of the
            time (docs/decisions/0088-loader-batch.md).
    """
    owner = {f: None if expanded else spec.owner.get(f) for f in spec.sparse}
    runs = {h.name: [_runs(h, r, expanded=expanded) for r in ranges] for h in spec.histories}
    inverse = {} if expanded else {g: _concat_inverse(ranges, g) for g in spec.groups}
    if not expanded:
        inverse |= {h.group: _concat_runs(runs[h.name]) for h in spec.histories if h.features}
    bags = _concat_bags(spec, ranges, runs, expanded=expanded)
    labels = _concat(ranges, lambda r: r.labels)
    dense = torch.from_numpy(_concat(ranges, lambda r: r.dense))
    num_tuples = {group: num_unique for group, (_, num_unique) in inverse.items()}
    layout = vector_layout(owner, num_tuples, len(labels))
    groups = {g: inverse_of(*of_group) for g, of_group in inverse.items()} if lookups else {}
    batch = CollatedBatch(
        step=step,
        num_samples=len(labels),
        labels=torch.from_numpy(labels),
        weights=torch.from_numpy(_concat(ranges, lambda r: r.weights)),
        dense=dense,
        sparse=_NO_SPARSE,
        lookups=table_lookups(features_of_tables(spec), bags, layout) if lookups else {},
        groups=groups,
        group_of=owner,
        shared=find_shared_features(groups, owner, dense) if find_shared else None,
        kept={name: _concat(ranges, lambda r, n=name: r.kept[n]) for name in spec.kept},
        histories={
            h.name: concat_histories(h.values, _runs_of_events(h, runs[h.name]))
            for h in spec.histories
        },
    )
    indices_of = {group: indices for group, (indices, _) in inverse.items()}
    sparse = _reader_kjt(bags, indices_of, owner, len(labels))
    if lookups and (versions := sparse.tensor_versions()) is not None:
        sparse.batch, sparse.versions = batch, versions
    return replace(batch, sparse=sparse)


def features_of_tables(spec: BatchSpec) -> dict[str, tuple[str, ...]]:
    """Return the sparse features of each table, in schema order, without unused tables."""
    features: dict[str, tuple[str, ...]] = {table: () for table in spec.tables}
    for feature in spec.sparse:
        features[spec.table_of[feature]] += (feature,)
    return {table: names for table, names in features.items() if names}


def _concat(ranges: Sequence[Range], array_of: Callable[[RowGroup], Array]) -> Array:
    return np.concatenate([array_of(r.row_group)[r.samples] for r in ranges])


def _runs(spec: HistorySpec, samples: Range, *, expanded: bool) -> HistoryRuns:
    arrays = samples.row_group.histories
    rows = HistoryRows.of(spec.name, spec.columns, arrays) if arrays else None
    return find_runs(spec, rows, samples.samples, expanded=expanded and bool(spec.sparse))


def _runs_of_events(spec: HistorySpec, runs: Sequence[HistoryRuns]) -> Sequence[HistoryRuns]:
    """Return the runs in which the events of a history are side by side."""
    if spec.runs != "window":
        return runs
    by_key = replace(spec, runs="key")
    return [find_runs(by_key, each.rows, each.samples) for each in runs]


def _concat_runs(ranges: Sequence[HistoryRuns]) -> tuple[NDArray[np.int64], int]:
    """Return the index of each sample's run in the batch, and the number of runs."""
    first = offsets_of(np.array([len(each.low) for each in ranges]))
    inverse = [each.inverse + start for each, start in zip(ranges, first.tolist(), strict=False)]
    return np.concatenate(inverse), int(first[-1])


def _concat_inverse(ranges: Sequence[Range], group: str) -> tuple[NDArray[np.int64], int]:
    """Return the index of each sample's tuple in the batch, and the number of tuples."""
    parts: list[NDArray[np.int64]] = []
    num_unique = 0
    for samples in ranges:
        parts.append(samples.inverse(group) + num_unique)
        chosen = samples.tuples(group)[1]
        num_unique += chosen.stop - chosen.start
    return np.concatenate(parts), num_unique


def _concat_bags(
    spec: BatchSpec,
    ranges: Sequence[Range],
    runs: Mapping[str, Sequence[HistoryRuns]],
    *,
    expanded: bool,
) -> KeyedBags:
    """Return the bags of all features, of each sample if `expanded`."""
    stored, as_features = (None, *spec.groups), [h for h in spec.histories if h.features]
    owners = (*stored, *(history.group for history in as_features))
    owner_of = [owners.index(spec.owner.get(feature)) for feature in spec.sparse]
    chosen = [
        [_bags(samples, owner, expanded) for owner in stored]
        + [(None, slice(0, len(runs[h.name][i].low))) for h in as_features]
        for i, samples in enumerate(ranges)
    ]
    lists = [
        [runs[h.name][i].lists_of(column) for h in as_features for column in h.sparse]
        for i in range(len(ranges))
    ]
    rows = np.array([[(r.start, r.stop) for _, r in each] for each in chosen], np.int64)
    lengths, offsets, values, weights = kernels.concat_lists(
        [
            (
                samples.row_group.list_columns_with(others)
                if others
                else samples.row_group.list_columns,
                [indices for indices, _ in each],
                of_owners.ravel(),
            )
            for samples, others, each, of_owners in zip(ranges, lists, chosen, rows, strict=True)
        ],
        np.array(owner_of, np.int64),
        np.finfo(spec.dtype).bits if spec.weighted else 0,
    )
    num_bags = (rows[..., 1] - rows[..., 0]).sum(0)[owner_of].tolist()
    return KeyedBags(
        num_bags=dict(zip(spec.sparse, num_bags, strict=True)),
        values=values,
        lengths=lengths,
        offsets=offsets,
        weights=weights if spec.weighted else None,
        weighted=frozenset(spec.weighted),
    )


def _bags(
    samples: Range, group: str | None, expanded: bool
) -> tuple[NDArray[np.int64] | None, slice]:
    """Return indices of bags in the row group, None for all in order, and the range of them."""
    if group is None:
        return None, samples.samples
    return (
        (samples.row_group.inverse[group], samples.samples) if expanded else samples.tuples(group)
    )


def _reader_kjt(
    bags: KeyedBags,
    inverse: Mapping[str, NDArray[np.int64]],
    owner: Mapping[str, str | None],
    num_samples: int,
) -> ReaderKeyedJaggedTensor:
    keys = list(bags.num_bags)
    strides: dict[str, Any] = {"stride": num_samples}
    if inverse:
        rows = np.stack([np.arange(num_samples), *inverse.values()])
        row_of = {None: 0, **{group: row for row, group in enumerate(inverse, 1)}}
        indices = torch.from_numpy(rows.take([row_of[owner[key]] for key in keys], axis=0))
        strides = {
            "stride_per_key_per_rank": [[count] for count in bags.num_bags.values()],
            "inverse_indices": (keys, indices),
        }
    return ReaderKeyedJaggedTensor(
        keys,
        torch.from_numpy(bags.values),
        None if bags.weights is None else torch.from_numpy(bags.weights),
        lengths=torch.from_numpy(bags.lengths),
        offsets=torch.from_numpy(bags.offsets),
        **strides,
    )


def move_batch(
    batch: CollatedBatch,
    model: ModelConfig,
    device: torch.device,
    row_numbers: torch.Tensor | None = None,
) -> CollatedBatch:
    """Return a batch with what a model computes on a device, copied in one block.

    Args:
        batch: in host memory, with look-ups.
        model: of the job.
        device: for cpu, the batch itself is returned.
        row_numbers: of `DeviceInputs`.
    """
    if device.type == "cpu":
        return batch
    inputs = DeviceInputs(
        merge_lookups(batch.lookups, batch.layout),
        find_dense_group(batch.groups, batch.dense),
        _history_of(batch, model) if model.name == "attention" else None,
        row_numbers,
    )
    names = ("labels", "weights", "dense", "groups", "shared", "histories")
    parts = {name: getattr(batch, name) for name in names} | {"device_inputs": inputs}
    return replace(batch, **to_device(parts, device))


def _history_of(batch: CollatedBatch, model: ModelConfig) -> HistoryLayout:
    feature = model.history
    assert feature is not None, "ModelConfig gives the attention model a history"
    [lookup] = [each for each in batch.lookups.values() if feature in each.features]
    bags = lookup.slices_of(feature)[1]
    offsets = lookup.bag_offsets[bags.start : bags.stop + 1].long()
    return lay_out_histories(offsets - offsets[0], batch.inverse_of(feature), model.max_history)


class ReaderKeyedJaggedTensor(KeyedJaggedTensor):
    """A KeyedJaggedTensor of the reader, which carries the look-ups of its batch."""

    batch: CollatedBatch | None = None
    """The batch, whose own `sparse` is empty."""
    versions: list[int] | None = None
    """Versions of the tensors when the look-ups were prepared."""

    def prepared_batch(self) -> CollatedBatch | None:
        """Return `batch`, None after an in-place change of a tensor, which its look-ups lack."""
        return self.batch if self.versions == self.tensor_versions() else None

    def tensor_versions(self) -> list[int] | None:
        """Return the number of changes of each tensor; None if torch does not count them."""
        indices = self.inverse_indices_or_none()
        tensors = [self.values(), self.lengths(), self.weights_or_none(), indices and indices[1]]
        present = [tensor for tensor in tensors if tensor is not None]
        if any(tensor.is_inference() for tensor in present):
            return None
        return [tensor._version for tensor in present]


# ---- Microbatches of a step, all of them or those of one process ----
#
# Forward and backward run per microbatch, so that its result depends on its samples alone.
# Embedding rows are gathered and updated once per step, for all microbatches.


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches:
    """Consecutive microbatches of one step.

    Attributes:
        step: all blocks of the step.
        num_microbatches: of the step.
        first: index of `batches[0]` within the step.
        batches: samples of each microbatch.
        rows: by table, distinct ascending rows; a superset of those that `batches` look up.
        work: of `batches`, in the unit of `Reader.work`.
        row_positions: per microbatch, by table, (num_rows_of_microbatch,) int32 positions in
            `rows`; None: all rows, in order.
    """

    step: Step
    num_microbatches: int
    first: int
    batches: tuple[CollatedBatch, ...]
    rows: Mapping[str, NDArray[np.int64]]
    row_positions: tuple[Mapping[str, torch.Tensor] | None, ...]
    work: float = 0.0

    @property
    def num_samples(self) -> int:
        """Samples of `batches`."""
        return sum(batch.num_samples for batch in self.batches)

    def row_numbers(self, index: int) -> torch.Tensor:
        """Return the rows of a microbatch among those of the step, one table after the other.

        Returns:
            (num_rows_of_microbatch,) int32.
        """
        ends = np.cumsum([0, *map(len, self.rows.values())]).tolist()
        positions = self.row_positions[index]
        if positions is None:
            return torch.arange(ends[-1], dtype=torch.int32)
        firsts = dict(zip(self.rows, ends, strict=False))
        return torch.cat([positions[t] + firsts[t] for t in self.batches[index].lookups])


def single_microbatch(batch: CollatedBatch) -> Microbatches:
    """Return a batch as the only microbatch of its step."""
    return Microbatches(
        step=batch.step,
        num_microbatches=1,
        first=0,
        batches=(batch,),
        rows={table: lookup.rows for table, lookup in batch.lookups.items()},
        row_positions=(None,),
    )


def make_microbatches(
    step: Step,
    num_microbatches: int,
    first: int,
    batches: Sequence[CollatedBatch],
    rows: Mapping[str, NDArray[np.int64]] | None = None,
    work: float = 0.0,
) -> Microbatches:
    """Return batches as microbatches, with the positions of their rows among those of the step.

    Args:
        step: all blocks of the step.
        num_microbatches: of the step.
        first: index of the first microbatch within the step.
        batches: one per microbatch; may be empty only if `rows` is given.
        rows: by table, distinct ascending rows of the step; None: the rows of `batches`.
        work: of `batches`.

    Raises:
        ValueError: a batch looks up a row that is not in `rows`.
    """
    step_rows: dict[str, NDArray[np.int64]] = {}
    row_positions: list[dict[str, torch.Tensor]] = [{} for _ in batches]
    for table in batches[0].lookups if rows is None else rows:
        rows_per_batch = [batch.lookups[table].rows for batch in batches]
        all_rows = np.concatenate([np.empty(0, np.int64), *rows_per_batch])
        if rows is None:
            step_rows[table], positions = kernels.distinct_positions(all_rows)
        else:
            step_rows[table] = rows[table]
            positions = _positions_in(table, rows[table], all_rows)
        edges = np.cumsum([0, *map(len, rows_per_batch)]).tolist()
        for by_table, (start, end) in zip(row_positions, pairwise(edges), strict=True):
            by_table[table] = torch.from_numpy(positions[start:end].astype(np.int32, copy=False))
    return Microbatches(
        step=step,
        num_microbatches=num_microbatches,
        first=first,
        batches=tuple(batches),
        rows=step_rows,
        row_positions=tuple(row_positions),
        work=work,
    )


def _positions_in(
    table: str, step_rows: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.integer]:
    found, positions = find_sorted(step_rows, rows)
    if not found.all():
        raise ValueError(
            f"index lacks rows that samples of the step look up: {int((~found).sum())} rows of "
            f"table {table!r}, the first is {rows[~found][0]}; rebuild the oracle"
        )
    return positions
