"""TorchRec's EmbeddingBagCollection and EmbeddingCollection, with the update in the backward pass.

To use them, change the import of a TorchRec model. Differences to TorchRec: tables use no memory
before their rows are looked up and may have 2**63 rows; rows are no parameters but are updated in
the backward pass, as by FBGEMM's fused optimizers, and are extra state in `state_dict`; both
collections accept inverse indices.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams, CacheStatistics
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from schemas.accesses import TableHints
from schemas.arrays import Array
from schemas.config.train import SparseOptimizerConfig
from trainer.data.collate import Batch, OrderedKeyedTensor, batch_from_kjt
from trainer.data.lookup import inverse_of, take_unsorted
from trainer.embedding.kernels.compiled import kernels_of
from trainer.embedding.kernels.interface import (
    ArenaRows,
    Kernels,
    TableRows,
    VectorGradients,
    rule_at,
    state_width,
)
from trainer.embedding.module import arena_rows
from trainer.embedding.pooling import Pooling, call_with_gradients
from trainer.stores.api import GatheredRows, Records, TableLayout
from trainer.stores.local import memory_store

_CPU = torch.device("cpu")


class EmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """Pooled look-ups: a replacement of TorchRec's class, updated in its backward pass."""

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | None = None,
        *,
        optimizer: SparseOptimizerConfig | None = None,
        seed: int = 0,
        dtype: str = "float32",
        kernels: str = "compiled",
    ) -> None:
        """Create empty tables.

        Args:
            tables: TorchRec's configs; widths and poolings may differ.
            is_weighted: look-ups have weights; a mean divides by their number, as FBGEMM's does.
            device: cpu or None.
            optimizer: update rule of the rows; None: row-wise Adagrad.
            seed: of the rows' initial values.
            dtype: float32 or float64.
            kernels: `compiled` or `torch`.

        Raises:
            ValueError: a config that TorchRec supports and this class does not.
        """
        super().__init__()
        _check(tables, device)
        for table in tables:
            if table.pooling not in (PoolingType.SUM, PoolingType.MEAN):
                raise ValueError(
                    f"pooling must be SUM or MEAN, got {table.pooling.name} of table "
                    f"{table.name!r}; use EmbeddingCollection for sequences"
                )
        self._tables, self._is_weighted = list(tables), is_weighted
        self._rows: dict[str, FusedRows] = {}
        self._parts: dict[str, list[EmbeddingBagConfig]] = {}
        for table in tables:
            key = f"{table.embedding_dim} {table.pooling.name.lower()}"
            self._parts.setdefault(key, []).append(table)
        for key, part in self._parts.items():
            self._rows[key] = _fused_rows(part, optimizer, kernels, seed=seed, dtype=dtype)
        self._anchor = torch.zeros(0, requires_grad=True)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool the rows of each bag and return the vector of each sample's bag.

        Args:
            features: with or without inverse indices.
        """
        parts: list[tuple[Sequence[str], int, torch.Tensor]] = []
        for key, part in self._parts.items():
            rows = self._rows[key]
            names = {t.name: tuple(t.feature_names) for t in part}
            dtype = rows.dtype if self._is_weighted else None
            batch = batch_from_kjt(
                features, names, weighted=dtype, transpose=rows.kernels.transpose
            )
            step = PooledStep(rows, batch, mean=part[0].pooling is PoolingType.MEAN)
            (pooled,) = _fused_outputs(step, self._anchor)
            parts.append((step.keys, part[0].embedding_dim, pooled))
        return OrderedKeyedTensor([f for t in self._tables for f in t.feature_names], parts)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the tables."""
        return self._tables

    def is_weighted(self) -> bool:
        """Return whether look-ups have weights."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return _CPU

    def get_extra_state(self) -> dict[str, Any]:
        """Return every row ever updated, for `state_dict`."""
        return {key: rows.state() for key, rows in self._rows.items()}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Load the rows of a `state_dict`."""
        for key, rows in self._rows.items():
            rows.load(state[key])


class EmbeddingCollection(EmbeddingCollectionInterface):
    """Unpooled look-ups: a replacement of TorchRec's class, updated in its backward pass."""

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | None = None,
        need_indices: bool = False,
        *,
        optimizer: SparseOptimizerConfig | None = None,
        seed: int = 0,
        dtype: str = "float32",
        kernels: str = "compiled",
    ) -> None:
        """Create empty tables. See `EmbeddingBagCollection`.

        Raises:
            ValueError: tables differ in width, or a config is not supported.
        """
        super().__init__()
        _check(tables, device)
        widths = {t.name: t.embedding_dim for t in tables}
        if len(set(widths.values())) > 1:
            raise ValueError(
                f"tables of an EmbeddingCollection must have one width, got {widths}; "
                "make a collection of each"
            )
        self._tables, self._need_indices = list(tables), need_indices
        self._rows = _fused_rows(self._tables, optimizer, kernels, seed=seed, dtype=dtype)
        self._anchor = torch.zeros(0, requires_grad=True)

    def unique(
        self, features: KeyedJaggedTensor
    ) -> dict[str, tuple[JaggedTensor, torch.Tensor | None]]:
        """Return the rows of each list once per unique tuple, and the tuple of each sample.

        Args:
            features: with or without inverse indices.

        Returns:
            By feature its lists, and (num_samples,) int64; None if sample i has list i.
        """
        names = {t.name: tuple(t.feature_names) for t in self._tables}
        batch = batch_from_kjt(
            features, names, weighted=None, transpose=self._rows.kernels.transpose
        )
        results: dict[str, tuple[JaggedTensor, torch.Tensor | None]] = {}
        outputs = _fused_outputs(SequenceStep(self._rows, batch), self._anchor)
        for lookup, values in zip(batch.lookups.values(), outputs, strict=True):
            parts = values.split(lookup.values_per_feature)
            for feature, part in zip(lookup.features, parts, strict=True):
                jagged = features[feature]
                indices = jagged.values() if self._need_indices else None
                lists = JaggedTensor(part, lengths=jagged.lengths(), weights=indices)
                group = batch.group_of[feature]
                results[feature] = lists, None if group is None else batch.groups[group].indices
        return results

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the rows of each sample's list; see `unique` for one list per tuple."""
        return {
            feature: lists if inverse is None else _expand(lists, inverse)
            for feature, (lists, inverse) in self.unique(features).items()
        }

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the configs of the tables."""
        return self._tables

    def need_indices(self) -> bool:
        """Return whether outputs carry the ids as weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Return the width of all rows."""
        return self._tables[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the features of each table."""
        return [list(t.feature_names) for t in self._tables]

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return _CPU

    def get_extra_state(self) -> dict[str, Any]:
        """Return every row ever updated, for `state_dict`."""
        return self._rows.state()

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Load the rows of a `state_dict`."""
        self._rows.load(state)


def rows_of(
    collection: EmbeddingBagCollection | EmbeddingCollection, table: str, rows: torch.Tensor
) -> torch.Tensor:
    """Return copies of some rows, (n, dim).

    Args:
        collection: contains the table.
        table: its name.
        rows: (n,) int64.
    """
    records = _rows_with(collection, table).store.tables[table].fetch(rows.numpy())
    return torch.from_numpy(records.values)


def set_rows(
    collection: EmbeddingBagCollection | EmbeddingCollection,
    table: str,
    rows: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Set the values of rows, such as those of a trained TorchRec table, and clear their state.

    Args:
        collection: contains the table.
        table: its name.
        rows: (n,) int64, distinct.
        values: (n, dim).
    """
    _rows_with(collection, table).set_rows(table, rows.numpy(), values.detach().numpy())


def _rows_with(collection: EmbeddingBagCollection | EmbeddingCollection, table: str) -> FusedRows:
    rows = collection._rows
    parts = rows.values() if isinstance(rows, dict) else [rows]
    return next(part for part in parts if table in part.store.tables)


def _expand(lists: JaggedTensor, inverse: torch.Tensor) -> JaggedTensor:
    """Repeat lists for their samples."""
    lengths = lists.lengths()[inverse]
    starts = lists.offsets()[inverse] - (lengths.cumsum(0) - lengths)
    positions = torch.arange(int(lengths.sum())) + starts.repeat_interleave(lengths)
    indices = lists.weights_or_none()
    return JaggedTensor(
        take_unsorted(lists.values(), positions),
        lengths=lengths,
        weights=None if indices is None else indices[positions],
    )


def _fused_rows(
    tables: Sequence[BaseEmbeddingConfig],
    optimizer: SparseOptimizerConfig | None,
    kernels: str,
    *,
    seed: int,
    dtype: str,
) -> FusedRows:
    return FusedRows(
        {t.name: t.num_embeddings for t in tables},
        tables[0].embedding_dim,
        optimizer or SparseOptimizerConfig(),
        kernels_of(kernels),
        seed=seed,
        dtype=dtype,
    )


def _check(tables: Sequence[BaseEmbeddingConfig], device: torch.device | None) -> None:
    """Raise ValueError for unsupported configs; warn of ignored settings."""
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"device must be cpu, got {device}; leave it out")
    names = [t.name for t in tables]
    features = [f for t in tables for f in t.feature_names]
    for kind, kind_names in (("table", names), ("feature", features)):
        duplicates = sorted({name for name in kind_names if kind_names.count(name) > 1})
        if duplicates:
            raise ValueError(
                f"{kind} names must be unique, got {duplicates[0]!r} twice; rename one"
            )
    for table in tables:
        if not table.feature_names:
            raise ValueError(f"table {table.name!r} has no feature_names; add one")
        if table.data_type is not DataType.FP32:
            raise ValueError(
                f"data_type must be FP32, got {table.data_type.name} of table {table.name!r}; "
                "leave it out"
            )
        if not isinstance(table.init_fn, functools.partial):
            warnings.warn(
                f"init_fn of table {table.name!r} is ignored: initial values are a hash of the "
                "row; set others by trainer.embedding.collections.set_rows",
                stacklevel=3,
            )


# ---- Rows that are updated in the backward pass ----


class FusedRows:
    """Rows of equal width, fetched in the forward pass and updated in the backward pass."""

    def __init__(
        self,
        num_rows: Mapping[str, int],
        dim: int,
        optimizer: SparseOptimizerConfig,
        kernels: Kernels,
        *,
        seed: int,
        dtype: str,
    ) -> None:
        """Create empty stores.

        Args:
            num_rows: rows of each table; a row uses memory once it is looked up.
            dim: width of a row.
            optimizer: update rule; its state is stored with each row.
            kernels: compute the updates.
            seed: of the rows' initial values.
            dtype: float32 or float64.
        """
        self._num_rows, self._optimizer, self.kernels = dict(num_rows), optimizer, kernels
        self.dtype: torch.dtype = getattr(torch, dtype)
        width = state_width(optimizer, dim)
        self.store = memory_store(
            {
                table: TableLayout(table=table, dim=dim, state_width=width, dtype=dtype, seed=seed)
                for table in num_rows
            }
        )
        self._version = 0  # of the rows' positions in the stores
        self._num_updates = 0

    def gather(self, rows: Mapping[str, NDArray[np.int64]]) -> tuple[int, dict[str, ArenaRows]]:
        """Return rows in place, and a version number for `update`.

        Without gradients, these are copies, and no row is created.

        Args:
            rows: table to distinct ascending rows.

        Raises:
            ValueError: a row is beyond its table.
        """
        for table, table_rows in rows.items():
            limit = self._num_rows[table]
            if len(table_rows) and table_rows[-1] >= limit:
                raise ValueError(
                    f"ids must be below num_embeddings, got {table_rows[-1]} for table {table!r} "
                    f"with num_embeddings={limit}; hash them, or enlarge the table"
                )
        if not torch.is_grad_enabled():
            records = self.store.fetch(self._num_updates, rows)
            copies = {table: arena_rows(GatheredRows(r)) for table, r in records.items()}
            return self._version, copies
        self._version += 1
        return self._version, self._gather(rows)

    def update(
        self,
        version: int,
        rows: Mapping[str, NDArray[np.int64]],
        gathered: Mapping[str, ArenaRows],
        readers: Mapping[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]],
        gradients: VectorGradients,
    ) -> None:
        """Sum the gradients of each row over its readers, and apply the update rule.

        Args:
            version: from `gather`; rows are gathered again if it is outdated.
            rows: table to the rows of the step.
            gathered: from `gather`.
            readers: table to readers, offsets of each row's readers, and the readers' weights.
            gradients: of the vectors that are read.
        """
        if version != self._version:
            gathered = self._gather(rows)
        tables = [
            TableRows(
                rows=gathered[table],
                readers=table_readers,
                reader_offsets=offsets,
                per_sample_weights=weights,
                extra_gradient=None,
            )
            for table, (table_readers, offsets, weights) in readers.items()
        ]
        self.kernels.update(tables, gradients, rule_at(self._optimizer, self._num_updates))
        self._num_updates += 1

    def _gather(self, rows: Mapping[str, NDArray[np.int64]]) -> dict[str, ArenaRows]:
        return {table: arena_rows(self.store.gather(table, r)) for table, r in rows.items()}

    def set_rows(self, table: str, rows: NDArray[np.int64], values: Array) -> None:
        """Set the values of rows and clear their optimizer state.

        Args:
            table: its name.
            rows: (n,), distinct.
            values: (n, dim).
        """
        store = self.store.tables[table]
        state = np.zeros((len(rows), store.layout.state_width), values.dtype)
        store.write(rows, Records(values, state))
        self._version += 1

    def state(self) -> dict[str, Any]:
        """Return every row ever updated, with its optimizer state."""
        tables: dict[str, dict[str, torch.Tensor]] = {}
        for table, store in self.store.tables.items():
            no_rows = np.zeros(0, np.int64)
            parts = [(no_rows, store.fetch(no_rows)), *store.contents()]
            arrays = {
                "rows": [rows for rows, _ in parts],
                "values": [records.values for _, records in parts],
                "state": [records.state for _, records in parts],
            }
            tables[table] = {n: torch.from_numpy(np.concatenate(a)) for n, a in arrays.items()}
        return {"num_updates": self._num_updates, "tables": tables}

    def load(self, state: Mapping[str, Any]) -> None:
        """Write the rows of `state`; others keep their values."""
        for table, arrays in state["tables"].items():
            records = Records(arrays["values"].numpy(), arrays["state"].numpy())
            self.store.tables[table].write(arrays["rows"].numpy(), records)
        self._num_updates = state["num_updates"]
        self._version += 1


class PooledStep:
    """Pooled look-ups of one forward pass."""

    def __init__(self, rows: FusedRows, batch: Batch, *, mean: bool) -> None:
        self._rows = rows
        self._lookups = batch.lookups
        self._pooling = Pooling(rows.kernels, batch, mean=mean)
        self.keys = self._pooling.keys
        self._step_rows = {t: lookup.rows for t, lookup in batch.lookups.items()}
        self._version, self._gathered = rows.gather(self._step_rows)

    def outputs(self) -> tuple[torch.Tensor]:
        """Return (num_samples, num_features * dim), features in the order of `keys`."""
        return (self._pooling.pool(self._gathered),)

    def update(self, *gradients: torch.Tensor) -> None:
        """Update rows by the gradients of the outputs."""
        self._pooling.add_gradient(gradients[0])
        vector_gradients = self._pooling.gradients
        assert vector_gradients is not None, "a gradient was just added"
        readers = {
            t: (lookup.readers, lookup.reader_offsets, lookup.reader_weights)
            for t, lookup in self._lookups.items()
        }
        self._rows.update(self._version, self._step_rows, self._gathered, readers, vector_gradients)


class SequenceStep:
    """Unpooled look-ups of one forward pass."""

    def __init__(self, rows: FusedRows, batch: Batch) -> None:
        self._rows = rows
        self._lookups = batch.lookups
        self._step_rows = {t: lookup.rows for t, lookup in batch.lookups.items()}
        self._version, self._gathered = rows.gather(self._step_rows)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Return by table (num_values, dim), features one after the other."""
        outputs: list[torch.Tensor] = []
        for table, lookup in self._lookups.items():
            rows, positions = self._gathered[table], lookup.positions
            if rows.positions is not None:
                positions = rows.positions.index_select(0, positions)
            outputs.append(rows.values.index_select(0, positions))
        return tuple(outputs)

    def update(self, *gradients: torch.Tensor) -> None:
        """Update rows by the gradients of the outputs."""
        readers: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        first = 0
        for table, lookup in self._lookups.items():
            positions = lookup.positions.numpy().astype("int64")
            inverse = inverse_of(positions, len(lookup.rows), self._rows.kernels.transpose)
            readers[table] = inverse.order + first, inverse.offsets, None
            first += len(lookup.positions)
        vectors = torch.cat(list(gradients))
        vector_gradients = VectorGradients(
            outputs=vectors[:, None], num_features=1, bags=vectors[:0], scales=None
        )
        self._rows.update(self._version, self._step_rows, self._gathered, readers, vector_gradients)


def _fused_outputs(step: PooledStep | SequenceStep, anchor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return a step's outputs; their backward updates its rows."""
    if not torch.is_grad_enabled():
        return step.outputs()
    return call_with_gradients(anchor, step.outputs, step.update)


# ---- Statistics of tables for TorchRec's sharding planner ----


class OracleCacheStatistics(CacheStatistics):
    """Cache misses of the run to come, counted from the oracle instead of estimated."""

    def __init__(self, hints: TableHints) -> None:
        self._lookups = hints.unique_rows_per_step
        fractions, misses = zip(*hints.lru_misses, strict=True)
        self._fractions, self._misses = np.array(fractions), np.array(misses)

    @property
    def expected_lookups(self) -> float:
        """Distinct rows of a global batch."""
        return self._lookups

    def expected_miss_rate(self, clf: float) -> float:
        """Return the miss rate of repeated accesses; the cache holds `clf` of the table."""
        return 0.0 if clf >= 1 else float(np.interp(clf, self._fractions, self._misses))

    @property
    def cacheability(self) -> float:
        """Area under the miss rate: 0 if a small cache has no misses, 1 if no cache helps."""
        beyond = self._misses[-1] * (1 - self._fractions[-1])
        return float(np.trapezoid(self._misses, self._fractions) + beyond)


def planner_constraints(tables: Mapping[str, TableHints]) -> dict[str, ParameterConstraints]:
    """Return constraints for `EmbeddingShardingPlanner`, by table.

    Args:
        tables: from `schemas.accesses.read_hints`.
    """
    return {
        name: ParameterConstraints(
            pooling_factors=list(hints.pooling_factors),
            num_poolings=list(hints.num_poolings),
            batch_sizes=list(hints.batch_sizes),
            feature_names=list(hints.feature_names),
            cache_params=CacheParams(stats=OracleCacheStatistics(hints)),
        )
        for name, hints in tables.items()
    }
