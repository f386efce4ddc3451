"""Look-ups of any KeyedJaggedTensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from presage.schemas.arrays import offsets_of
from presage.schemas.dataset.order import Step
from presage.schemas.errors import SchemaError
from presage.trainer.data.collate import CollatedBatch, ReaderKeyedJaggedTensor, num_tuples
from presage.trainer.data.lookup import (
    Inverse,
    KeyedBags,
    TableLookup,
    inverse_of,
    table_lookups,
    vector_layout,
)
from presage.trainer.slots.slot_map import SlotMap

# ---- Look-ups of any KeyedJaggedTensor ----

Tables = Mapping[str, tuple[str, ...]]
"""Table to the features that look into it."""


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
) -> CollatedBatch:
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
    layout = vector_layout(group_of, num_tuples(groups), num_samples)
    return CollatedBatch(
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
    batch: CollatedBatch, tables: Tables, *, weighted: torch.dtype | None
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


def slots_of_lookups(
    slots: SlotMap, sparse: KeyedJaggedTensor, tables: Sequence[int], source: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the slot of each value within its table, and the first value of each key.

    Args:
        slots: of the rows of a step.
        sparse: rows.
        tables: of each key; -1: its values are returned as they are.
        source: of the slots, for an error: "plan of step 3".

    Raises:
        SchemaError: a row has no slot.
    """
    keys, values = sparse.keys(), sparse.values().numpy()
    offsets = np.array(sparse.offset_per_key(), np.int64)
    slot_of_value, missing = slots.find(values, offsets, np.array(tables, np.int64))
    if missing >= 0:
        feature = keys[int(np.searchsorted(offsets, missing, side="right")) - 1]
        raise SchemaError(
            f"{source} lacks row {values[missing]} of feature {feature!r}; build the dataset's "
            "index again"
        )
    return slot_of_value, offsets
