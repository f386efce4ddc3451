"""TorchRec's embedding collections on our rows, with the update in the backward pass."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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

from schemas.arrays import Array
from schemas.config.train import SparseOptimizerConfig
from trainer.data.collate import Batch, OrderedKeyedTensor, step_of
from trainer.data.lookup import inverse_of, take_unsorted
from trainer.embedding.kernels.compiled import kernels_of
from trainer.embedding.kernels.interface import ArenaRows, Kernels, PlaceGradients, TableRows
from trainer.embedding.module import arena_rows
from trainer.embedding.optimizer import rule_at, state_width
from trainer.embedding.pooling import Pooling
from trainer.stores.api import Lent, Records, TableLayout, fetch_rows
from trainer.stores.local import ArrayStore, memory_store


class FusedRows:
    """Rows of equal width, fetched for a step and updated when its gradient is known."""

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
        """Begin with no row in memory.

        Args:
            num_rows: rows of each table; one costs nothing before it is looked up.
            dim: width of a row.
            optimizer: update rule, whose state lies beside each row.
            kernels: what computes.
            seed: of the rows' first values.
            dtype: float32 or float64.
        """
        self._num_rows, self._optimizer, self.kernels = dict(num_rows), optimizer, kernels
        self.dtype: torch.dtype = getattr(torch, dtype)
        width = state_width(optimizer, dim)
        self.stores: dict[str, ArrayStore] = {
            table: memory_store(
                TableLayout(table=table, dim=dim, state_width=width, dtype=dtype, seed=seed)
            )
            for table in num_rows
        }
        self._num_lent = 0
        self._num_updates = 0

    def lend(self, rows: Mapping[str, NDArray[np.int64]]) -> tuple[int, dict[str, ArenaRows]]:
        """Return where rows lie, and the number of this call, which `update` asks for.

        Where no gradient is wanted, these are copies, and no row is made.

        Args:
            rows: table to distinct ascending rows.

        Raises:
            ValueError: a row is beyond its table.
        """
        for table, wanted in rows.items():
            limit = self._num_rows[table]
            if len(wanted) and wanted[-1] >= limit:
                raise ValueError(
                    f"ids must be below num_embeddings, got {wanted[-1]} for table {table!r} with "
                    f"num_embeddings={limit}; hash them, or enlarge the table"
                )
        if not torch.is_grad_enabled():
            found = fetch_rows(self.stores, self._num_updates, rows)
            return self._num_lent, {table: arena_rows(Lent(r)) for table, r in found.items()}
        self._num_lent += 1
        return self._num_lent, self._lent(rows)

    def update(
        self,
        number: int,
        rows: Mapping[str, NDArray[np.int64]],
        lent: Mapping[str, ArenaRows],
        readers: Mapping[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]],
        gradients: PlaceGradients,
    ) -> None:
        """Sum the gradients of rows over who reads them, and apply the update rule.

        Args:
            number: of the call that lent them; where others came since, rows may lie elsewhere.
            rows: table to the rows of the step.
            lent: where they lay.
            readers: table to readers, where each row's lie, and the factors of each.
            gradients: of each place that is read from.
        """
        if number != self._num_lent:
            lent = self._lent(rows)
        tables = [
            TableRows(
                rows=lent[table],
                readers=found,
                reader_offsets=offsets,
                factors=factors,
                more=None,
            )
            for table, (found, offsets, factors) in readers.items()
        ]
        self.kernels.update(tables, gradients, rule_at(self._optimizer, self._num_updates))
        self._num_updates += 1

    def _lent(self, rows: Mapping[str, NDArray[np.int64]]) -> dict[str, ArenaRows]:
        return {table: arena_rows(self.stores[table].lend(found)) for table, found in rows.items()}

    def set_rows(self, table: str, rows: NDArray[np.int64], values: Array) -> None:
        """Give rows other values, and no optimizer state.

        Args:
            table: its name.
            rows: (n,), distinct.
            values: (n, dim).
        """
        store = self.stores[table]
        state = np.zeros((len(rows), store.layout.state_width), values.dtype)
        store.write(rows, Records(values, state))
        self._num_lent += 1

    def state(self) -> dict[str, Any]:
        """Return every row ever updated, with its optimizer state."""
        tables: dict[str, dict[str, torch.Tensor]] = {}
        for table, store in self.stores.items():
            none = np.zeros(0, np.int64)
            parts = [(none, store.fetch(none)), *store.contents()]
            arrays = {
                "rows": [rows for rows, _ in parts],
                "values": [records.values for _, records in parts],
                "state": [records.state for _, records in parts],
            }
            tables[table] = {n: torch.from_numpy(np.concatenate(a)) for n, a in arrays.items()}
        return {"num_updates": self._num_updates, "tables": tables}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take the rows of `state` in the place of those with the same number."""
        for table, arrays in state["tables"].items():
            records = Records(arrays["values"].numpy(), arrays["state"].numpy())
            self.stores[table].write(arrays["rows"].numpy(), records)
        self._num_updates = state["num_updates"]
        self._num_lent += 1


class PooledStep:
    """Pooled look-ups of one forward pass."""

    def __init__(self, rows: FusedRows, batch: Batch, *, mean: bool) -> None:
        """Fetch the rows of a batch."""
        self._rows = rows
        self._lookups = batch.lookups
        self._pooling = Pooling(rows.kernels, batch, mean=mean)
        self.keys = self._pooling.keys
        self._wanted = {t: lookup.rows for t, lookup in batch.lookups.items()}
        self._number, self._lent = rows.lend(self._wanted)

    def outputs(self) -> tuple[torch.Tensor]:
        """Return (num_samples, num_features * dim), features in the order of `keys`."""
        return (self._pooling.pool(self._lent),)

    def update(self, gradients: Sequence[torch.Tensor]) -> None:
        """Update rows by the gradients of the outputs."""
        self._pooling.add(gradients[0])
        found = self._pooling.gradients
        assert found is not None, "a gradient was just added"
        readers = {
            t: (lookup.readers, lookup.reader_offsets, lookup.reader_factors)
            for t, lookup in self._lookups.items()
        }
        self._rows.update(self._number, self._wanted, self._lent, readers, found)


class SequenceStep:
    """Look-ups of one forward pass that are not pooled: each is read by itself."""

    def __init__(self, rows: FusedRows, batch: Batch) -> None:
        """Fetch the rows of a batch."""
        self._rows = rows
        self._lookups = batch.lookups
        self._wanted = {t: lookup.rows for t, lookup in batch.lookups.items()}
        self._number, self._lent = rows.lend(self._wanted)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Return by table (num_values, dim), features one after the other."""
        found: list[torch.Tensor] = []
        for table, lookup in self._lookups.items():
            rows, places = self._lent[table], lookup.positions
            if rows.places is not None:
                places = rows.places.index_select(0, places)
            found.append(rows.values.index_select(0, places))
        return tuple(found)

    def update(self, gradients: Sequence[torch.Tensor]) -> None:
        """Update rows by the gradients of the outputs."""
        readers: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        first = 0
        for table, lookup in self._lookups.items():
            positions = lookup.positions.numpy().astype("int64")
            found = inverse_of(positions, len(lookup.rows), self._rows.kernels.transpose)
            readers[table] = found.order + first, found.offsets, None
            first += len(lookup.positions)
        every = torch.cat(list(gradients))
        places = PlaceGradients(outputs=every[:, None], num_features=1, bags=every[:0], scales=None)
        self._rows.update(self._number, self._wanted, self._lent, readers, places)


class Fused(torch.autograd.Function):
    """Outputs of a step; its backward is the step's update."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """Return what the step gives; the first argument makes autograd come back."""
        _, step = args
        ctx.step = step
        return step.outputs()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Hand the gradients to the step."""
        ctx.step.update(grads)
        return None, None


def outputs_of(step: Any, anchor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return a step's outputs; with gradients wanted, going back through them updates rows."""
    return Fused.apply(anchor, step) if torch.is_grad_enabled() else step.outputs()


# TorchRec's collections on our rows: change the import, keep the model.
#
# Differences that a user sees: tables cost no memory before they are used and may have 2**63
# rows; rows are no parameters but are updated in the backward pass, as by FBGEMM's fused
# optimizers, and lie in `state_dict` as extra state; inverse indices are understood by both
# collections.

_PROCESSOR = torch.device("cpu")


class EmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """Pooled look-ups: TorchRec's class of that name, trained by its own backward pass."""

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
        """Keep the tables; no row is made yet.

        Args:
            tables: TorchRec's configs, any width and either pooling of each.
            is_weighted: look-ups have weights; a mean divides by their number, as FBGEMM's does.
            device: the processor, or None.
            optimizer: update rule of the rows; row-wise Adagrad when None.
            seed: of the rows' first values.
            dtype: float32 or float64.
            kernels: `compiled` or `torch`.

        Raises:
            ValueError: something that TorchRec knows and this does not; it says what.
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
        """Pool the rows of each bag; every sample gets its bag's vector.

        Args:
            features: of a reader's batch, or any other; inverse indices may be there.
        """
        found: list[tuple[Sequence[str], int, torch.Tensor]] = []
        for key, part in self._parts.items():
            rows = self._rows[key]
            names = {t.name: tuple(t.feature_names) for t in part}
            dtype = rows.dtype if self._is_weighted else None
            batch = step_of(features, names, weighted=dtype, transpose=rows.kernels.transpose)
            step = PooledStep(rows, batch, mean=part[0].pooling is PoolingType.MEAN)
            (pooled,) = outputs_of(step, self._anchor)
            found.append((step.keys, part[0].embedding_dim, pooled))
        return OrderedKeyedTensor([f for t in self._tables for f in t.feature_names], found)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the tables."""
        return self._tables

    def is_weighted(self) -> bool:
        """Tell whether look-ups have weights."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """The processor."""
        return _PROCESSOR

    def get_extra_state(self) -> dict[str, Any]:
        """Return every row ever updated, for `state_dict`."""
        return {key: rows.state() for key, rows in self._rows.items()}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take the rows of a `state_dict`."""
        for key, rows in self._rows.items():
            rows.load(state[key])


class EmbeddingCollection(EmbeddingCollectionInterface):
    """Look-ups that are not pooled: TorchRec's class of that name, trained by its backward pass."""

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
        """Keep the tables; no row is made yet. See `EmbeddingBagCollection`.

        Raises:
            ValueError: tables differ in width, or something that this does not know.
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
            features: of a reader's batch, or any other.

        Returns:
            By feature its lists, and (num_samples,) int64, None where each sample has its own.
        """
        names = {t.name: tuple(t.feature_names) for t in self._tables}
        batch = step_of(features, names, weighted=None, transpose=self._rows.kernels.transpose)
        found: dict[str, tuple[JaggedTensor, torch.Tensor | None]] = {}
        outputs = outputs_of(SequenceStep(self._rows, batch), self._anchor)
        for lookup, values in zip(batch.lookups.values(), outputs, strict=True):
            parts = values.split(lookup.values_per_feature)
            for feature, part in zip(lookup.features, parts, strict=True):
                jagged = features[feature]
                indices = jagged.values() if self._need_indices else None
                lists = JaggedTensor(part, lengths=jagged.lengths(), weights=indices)
                group = batch.group_of[feature]
                found[feature] = lists, None if group is None else batch.groups[group].indices
        return found

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the rows of each sample's list; `unique` has them once per unique tuple."""
        return {
            feature: lists if inverse is None else _expanded(lists, inverse)
            for feature, (lists, inverse) in self.unique(features).items()
        }

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the configs of the tables."""
        return self._tables

    def need_indices(self) -> bool:
        """Tell whether outputs carry the ids as weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Return the width of all rows."""
        return self._tables[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the features of each table."""
        return [list(t.feature_names) for t in self._tables]

    @property
    def device(self) -> torch.device:
        """The processor."""
        return _PROCESSOR

    def get_extra_state(self) -> dict[str, Any]:
        """Return every row ever updated, for `state_dict`."""
        return self._rows.state()

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take the rows of a `state_dict`."""
        self._rows.load(state)


def rows_of(
    collection: EmbeddingBagCollection | EmbeddingCollection, table: str, rows: torch.Tensor
) -> torch.Tensor:
    """Return copies of some rows, (n, dim).

    Args:
        collection: which has the table.
        table: its name.
        rows: (n,) int64.
    """
    return torch.from_numpy(_rows_with(collection, table).stores[table].fetch(rows.numpy()).values)


def set_rows(
    collection: EmbeddingBagCollection | EmbeddingCollection,
    table: str,
    rows: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Give rows other values, such as those of a trained TorchRec table; their state becomes 0.

    Args:
        collection: which has the table.
        table: its name.
        rows: (n,) int64, distinct.
        values: (n, dim).
    """
    _rows_with(collection, table).set_rows(table, rows.numpy(), values.detach().numpy())


def _rows_with(collection: EmbeddingBagCollection | EmbeddingCollection, table: str) -> FusedRows:
    found = collection._rows
    parts = found.values() if isinstance(found, dict) else [found]
    return next(part for part in parts if table in part.stores)


def _expanded(lists: JaggedTensor, inverse: torch.Tensor) -> JaggedTensor:
    """Repeat lists for the samples that have them."""
    lengths = lists.lengths()[inverse]
    starts = lists.offsets()[inverse] - (lengths.cumsum(0) - lengths)
    places = torch.arange(int(lengths.sum())) + starts.repeat_interleave(lengths)
    indices = lists.weights_or_none()
    return JaggedTensor(
        take_unsorted(lists.values(), places),
        lengths=lengths,
        weights=None if indices is None else indices[places],
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
    """Refuse what the collections cannot do; warn of what they leave out."""
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"device must be cpu, got {device}; leave it out")
    names = [t.name for t in tables]
    features = [f for t in tables for f in t.feature_names]
    for what, found in (("table", names), ("feature", features)):
        twice = sorted({name for name in found if found.count(name) > 1})
        if twice:
            raise ValueError(f"{what} must be named once, got {twice[0]!r} twice; rename one")
    for table in tables:
        if not table.feature_names:
            raise ValueError(f"table must have feature_names, got none of {table.name!r}; add one")
        if table.data_type is not DataType.FP32:
            raise ValueError(
                f"data_type must be FP32, got {table.data_type.name} of table {table.name!r}; "
                "leave it out"
            )
        if not isinstance(table.init_fn, functools.partial):
            warnings.warn(
                f"init_fn of table {table.name!r} is not used: rows start as a hash of their "
                "number; set others by trainer.embedding.collections.set_rows",
                stacklevel=3,
            )
