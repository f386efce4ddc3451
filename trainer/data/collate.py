"""Batches as tensors, deduplicated or expanded; microbatches; look-ups of any KeyedJaggedTensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from schemas.arrays import Array, find_sorted, offsets_of
from schemas.config.train import ModelConfig
from schemas.dataset.order import Step
from trainer.data import batch as kernels
from trainer.data.attention_layout import HistoryLayout, lay_out_histories
from trainer.data.decode import BatchSpec, RowGroup
from trainer.data.lookup import (
    Inverse,
    KeyedBags,
    TableLookup,
    VectorLayout,
    inverse_of,
    merge_lookups,
    table_lookups,
    vector_layout,
)
from trainer.data.shared import SharedFeatures, find_dense_group, find_shared_features
from trainer.device.transfer import to_device


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
class Batch:
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

    @property
    def layout(self) -> VectorLayout:
        """Layout of pooled vectors; the indices in `lookups` refer to it."""
        return vector_layout(self.group_of, _num_tuples(self.groups), self.num_samples)

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
"""Of the batch that a KeyedJaggedTensor carries."""


def _num_tuples(groups: Mapping[str, Inverse]) -> dict[str, int]:
    return {group: inverse.num_unique for group, inverse in groups.items()}


@dataclass(frozen=True, slots=True)
class BlockRange:
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


Range = BlockRange | PartOfBlock


def collate(
    spec: BatchSpec,
    step: Step,
    ranges: Sequence[Range],
    *,
    expanded: bool,
    find_shared: bool = False,
    lookups: bool = True,
) -> Batch:
    """Return the batch of some blocks.

    Args:
        spec: columns of the batch.
        step: blocks of the batch.
        ranges: their samples, in batch order.
        expanded: one bag per sample instead of one per unique tuple.
        find_shared: set `Batch.shared`; needs `lookups`.
        lookups: set `Batch.lookups` and `Batch.groups`, for our collections; they take most of the
            time (presage/README.md).
    """
    owner = {f: None if expanded else spec.owner.get(f) for f in spec.sparse}
    inverse = {} if expanded else {g: _concat_inverse(ranges, g) for g in spec.groups}
    bags = _concat_bags(spec, ranges, expanded=expanded)
    labels = _concat(ranges, lambda r: r.labels)
    dense = torch.from_numpy(_concat(ranges, lambda r: r.dense))
    num_tuples = {group: num_unique for group, (_, num_unique) in inverse.items()}
    layout = vector_layout(owner, num_tuples, len(labels))
    groups = {g: inverse_of(*of_group) for g, of_group in inverse.items()} if lookups else {}
    batch = Batch(
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


def _concat_inverse(ranges: Sequence[Range], group: str) -> tuple[NDArray[np.int64], int]:
    """Return the index of each sample's tuple in the batch, and the number of tuples."""
    parts: list[NDArray[np.int64]] = []
    num_unique = 0
    for samples in ranges:
        parts.append(samples.inverse(group) + num_unique)
        chosen = samples.tuples(group)[1]
        num_unique += chosen.stop - chosen.start
    return np.concatenate(parts), num_unique


def _concat_bags(spec: BatchSpec, ranges: Sequence[Range], *, expanded: bool) -> KeyedBags:
    """Return the bags of all features, of each sample if `expanded`."""
    owners = (None, *spec.groups)
    owner_of = [owners.index(spec.owner.get(feature)) for feature in spec.sparse]
    chosen = [[_bags(samples, owner, expanded) for owner in owners] for samples in ranges]
    rows = np.array([[(r.start, r.stop) for _, r in each] for each in chosen], np.int64)
    lengths, offsets, values, weights = kernels.concat_lists(
        [
            (samples.row_group.list_columns, [indices for indices, _ in each], of_owners.ravel())
            for samples, each, of_owners in zip(ranges, chosen, rows, strict=True)
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
    batch: Batch,
    model: ModelConfig,
    device: torch.device,
    row_numbers: torch.Tensor | None = None,
) -> Batch:
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
    names = ("labels", "weights", "dense", "groups", "shared")
    parts = {name: getattr(batch, name) for name in names} | {"device_inputs": inputs}
    return replace(batch, **to_device(parts, device))


def _history_of(batch: Batch, model: ModelConfig) -> HistoryLayout:
    feature = model.history
    assert feature is not None, "ModelConfig gives the attention model a history"
    [lookup] = [each for each in batch.lookups.values() if feature in each.features]
    bags = lookup.slices_of(feature)[1]
    offsets = lookup.bag_offsets[bags.start : bags.stop + 1].long()
    return lay_out_histories(offsets - offsets[0], batch.inverse_of(feature), model.max_history)


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
        row_positions: per microbatch, by table, (num_rows_of_microbatch,) int32 positions in
            `rows`; None: all rows, in order.
    """

    step: Step
    num_microbatches: int
    first: int
    batches: tuple[Batch, ...]
    rows: Mapping[str, NDArray[np.int64]]
    row_positions: tuple[Mapping[str, torch.Tensor] | None, ...]

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


def single_microbatch(batch: Batch) -> Microbatches:
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
    batches: Sequence[Batch],
    rows: Mapping[str, NDArray[np.int64]] | None = None,
) -> Microbatches:
    """Return batches as microbatches, with the positions of their rows among those of the step.

    Args:
        step: all blocks of the step.
        num_microbatches: of the step.
        first: index of the first microbatch within the step.
        batches: one per microbatch; may be empty only if `rows` is given.
        rows: by table, distinct ascending rows of the step; None: the rows of `batches`.

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


# ---- Look-ups of any KeyedJaggedTensor ----

Tables = Mapping[str, tuple[str, ...]]
"""Table to the features that look into it."""


class ReaderKeyedJaggedTensor(KeyedJaggedTensor):
    """A KeyedJaggedTensor of the reader, which carries the look-ups of its batch."""

    batch: Batch | None = None
    """The batch, whose own `sparse` is empty."""
    versions: list[int] | None = None
    """Of the tensors when the look-ups were prepared."""

    def prepared_batch(self) -> Batch | None:
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


class OrderedKeyedTensor(KeyedTensor):
    """A KeyedTensor over blocks of vectors in another order than its keys.

    Access by key copies nothing; `values` concatenates the vectors on first use.
    """

    def __init__(
        self, keys: list[str], parts: Sequence[tuple[Sequence[str], int, torch.Tensor]]
    ) -> None:
        """Split the blocks by key.

        Args:
            keys: order of `values`.
            parts: keys, their width, and (num_samples, len(keys) * width).
        """
        self._parts: dict[str, torch.Tensor] = {}
        for names, width, wide in parts:
            self._parts.update(zip(names, wide.split(width, dim=1), strict=True))
        is_ordered = len(parts) == 1 and list(parts[0][0]) == keys
        self._ordered = parts[0][2] if is_ordered else None
        super().__init__(keys, [self._parts[k].shape[1] for k in keys], parts[0][2])

    @property
    def _values(self) -> torch.Tensor:
        if self._ordered is None:
            self._ordered = torch.cat([self._parts[key] for key in self.keys()], dim=1)
        return self._ordered

    @_values.setter
    def _values(self, values: torch.Tensor) -> None:
        """Ignore the assignment in the base class's constructor."""

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return (num_samples, width) of a key."""
        return self._parts[key]

    def to_dict(self) -> dict[str, torch.Tensor]:
        """Return the vectors by key, in the order of the keys."""
        return {key: self._parts[key] for key in self.keys()}


def batch_from_kjt(
    sparse: KeyedJaggedTensor, tables: Tables, *, weighted: torch.dtype | None
) -> Batch:
    """Return a batch with the look-ups of some tables; labels and dense features are empty.

    A KeyedJaggedTensor of the reader carries its look-ups; those of any other one, or of one that
    was changed in place, are sorted here.
    Features with equal inverse indices form a dedup group.

    Args:
        sparse: rows of tables, in CPU memory.
        tables: features of each table.
        weighted: type of the look-up weights in `sparse`; None: all weights are one.

    Raises:
        ValueError: a feature is no key, an id is negative, lengths or inverse indices do not fit,
            or `weighted` is set and `sparse` has no weights.
    """
    batch = sparse.prepared_batch() if isinstance(sparse, ReaderKeyedJaggedTensor) else None
    reader_lookups = None if batch is None else _reader_lookups(batch, tables, weighted=weighted)
    if batch is not None and reader_lookups is not None:
        return replace(batch, lookups=reader_lookups)
    features = tuple(f for names in tables.values() for f in names)
    _check(sparse, features, weighted=weighted is not None)
    bags = _bags_of({f: sparse[f] for f in features}, weighted)
    group_of, groups = _groups_of(sparse, bags.num_bags)
    inverse = sparse.inverse_indices_or_none()
    num_samples = bags.num_bags[features[0]] if inverse is None else inverse[1].shape[1]
    layout = vector_layout(group_of, _num_tuples(groups), num_samples)
    return Batch(
        step=Step(0, 0, 0, np.zeros(0, np.int64)),
        num_samples=num_samples,
        labels=torch.empty(0),
        weights=torch.empty(0),
        dense=torch.empty(num_samples, 0),
        sparse=sparse,
        lookups=table_lookups(tables, bags, layout),
        groups=groups,
        group_of=group_of,
    )


def _bags_of(jagged: Mapping[str, JaggedTensor], weighted: torch.dtype | None) -> KeyedBags:
    parts = {f: (_int64_array(j.values()), _int64_array(j.lengths())) for f, j in jagged.items()}
    for feature, (rows, lengths) in parts.items():
        if len(rows) and rows.min() < 0:
            raise ValueError(
                f"ids must not be negative, got {rows.min()} of feature {feature!r}; hash them"
            )
        if lengths.min(initial=0) < 0 or lengths.sum() != len(rows):
            raise ValueError(
                f"lengths of feature {feature!r} must sum to its {len(rows)} values, got "
                f"{lengths.sum()}"
            )
    lengths = np.concatenate([lengths for _, lengths in parts.values()])
    weights = None
    if weighted is not None:
        weights = torch.cat([j.weights() for j in jagged.values()]).to(weighted).numpy()
    return KeyedBags(
        num_bags={f: len(lengths) for f, (_, lengths) in parts.items()},
        values=np.concatenate([rows for rows, _ in parts.values()]),
        lengths=lengths,
        offsets=offsets_of(lengths),
        weights=weights,
        weighted=frozenset() if weights is None else frozenset(parts),
    )


def _reader_lookups(
    batch: Batch, tables: Tables, *, weighted: torch.dtype | None
) -> dict[str, TableLookup] | None:
    """Return the reader's look-ups of these tables; None if it has others.

    Tables are matched by their features, since their names may differ.
    """
    lookups = {frozenset(lookup.features): lookup for lookup in batch.lookups.values()}
    matches = {t: lookups.get(frozenset(features)) for t, features in tables.items()}
    chosen = {t: lookup for t, lookup in matches.items() if lookup is not None}
    is_same = len(chosen) == len(tables) == len(lookups)
    weights = [lookup.per_sample_weights for lookup in chosen.values()]
    dtypes = {None if w is None else w.dtype for w in weights}
    return chosen if is_same and weighted in dtypes and dtypes <= {None, weighted} else None


def _check(sparse: KeyedJaggedTensor, features: tuple[str, ...], *, weighted: bool) -> None:
    if sparse.device().type != "cpu":
        raise ValueError(
            f"look-ups must be in CPU memory, where a collection of Presage keeps its rows, got a "
            f"KeyedJaggedTensor on {sparse.device()}; pass the batch's before it is moved, and "
            "move the result"
        )
    for feature in features:
        if feature not in sparse.keys():  # noqa: SIM118 (it is no mapping)
            raise ValueError(
                f"features must be keys of the KeyedJaggedTensor, got {feature!r}; it has "
                f"{', '.join(sparse.keys())}"
            )
    weights = sparse.weights_or_none()
    if weighted and weights is None:
        raise ValueError(
            "KeyedJaggedTensor has no weights for a weighted collection; pass them, or leave "
            "is_weighted out"
        )
    if weighted and weights is not None and weights.requires_grad:
        raise ValueError(
            "weights of look-ups must not require grad: they get no gradient; detach them"
        )


def _groups_of(
    sparse: KeyedJaggedTensor, num_bags: Mapping[str, int]
) -> tuple[dict[str, str | None], dict[str, Inverse]]:
    """Return the group of each feature, named after its first one, and each group's inverse."""
    inverse = sparse.inverse_indices_or_none()
    if inverse is None:
        return dict.fromkeys(num_bags), {}
    names, rows = inverse[0], _int64_array(inverse[1])
    identity = np.arange(rows.shape[1])
    group_of: dict[str, str | None] = {}
    groups: dict[str, Inverse] = {}
    group_of_indices: dict[tuple[int, bytes], str] = {}
    for feature, count in num_bags.items():
        indices = rows[list(names).index(feature)]
        if count == len(identity) and np.array_equal(indices, identity):
            group_of[feature] = None
            continue
        group = group_of_indices.setdefault((count, indices.tobytes()), feature)
        group_of[feature] = group
        if group == feature:
            groups[group] = inverse_of(indices, count)
    return group_of, groups


def _int64_array(tensor: torch.Tensor) -> NDArray[np.int64]:
    return tensor.detach().numpy().astype(np.int64, copy=False)
