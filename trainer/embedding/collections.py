"""TorchRec's EmbeddingBagCollection and EmbeddingCollection, with the update in the backward pass.

To use them, change the import of a TorchRec model. Differences to TorchRec: tables use no memory
before their rows are looked up and may have 2**63 rows; rows are no parameters but are updated in
the backward pass, as by FBGEMM's fused optimizers, and are extra state in `state_dict`; both
collections accept inverse indices.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
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

from presage.schemas.config.train import SparseOptimizerConfig
from presage.schemas.errors import first_difference
from presage.trainer.data.kjt_lookups import OrderedKeyedTensor, batch_from_kjt
from presage.trainer.data.lookup import take_unsorted
from presage.trainer.embedding.fused import (
    ExternalRows,
    FusedRows,
    PooledStep,
    SequenceStep,
    fused_outputs,
)
from presage.trainer.embedding.ranks import has_ranks
from presage.trainer.embedding.state_tensor import pack, unpack
from presage.trainer.stores.store import Records

_CPU = torch.device("cpu")
T = TypeVar("T", bound="Collection")
F = TypeVar("F", bound=Callable[..., Any])


def _outside_of_graphs(function: F) -> F:
    """Break the graph of torch.compile at a call."""
    return cast("F", torch.compiler.disable(function))


class Collection(nn.Module):
    """What both collections share: their rows, and what torch sees of them.

    Rows are no parameters. Two tensors of one element, which nothing reads, stand for them:
    `autograd_anchor` is frozen and clipped with the parameters of a model, and `_copied` is written
    by what copies models.
    """

    _rows: dict[str, FusedRows]
    _copied: torch.Tensor

    def _set_rows(self, rows: dict[str, FusedRows]) -> None:
        self._rows = rows
        self.autograd_anchor = nn.Parameter(torch.zeros(1, device=_CPU))
        self.register_buffer("_copied", torch.zeros(1, device=_CPU), persistent=False)
        self._num_copies = 0
        self._updated: tuple[torch.Tensor, int, float] | None = None
        """Gradient of the anchor after the last update, its version and its value."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._num_copies, self._updated = _num_changes(self._copied), None

    def fused_rows(self) -> Iterable[FusedRows]:
        """Return the rows, by width and pooling."""
        return self._rows.values()

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return _CPU

    def get_extra_state(self) -> torch.Tensor:
        """Return every row ever updated, for `state_dict`; no rows of a source."""
        arrays: dict[str, Any] = {}
        steps: list[int | None] = []
        for rows in self.fused_rows():
            steps.append(rows.source_step)
            if rows.source_step is None:
                for table in rows.layouts:
                    table_rows, records = rows.contents(table)
                    parts = {"rows": table_rows, "records": records.block}
                    arrays |= {f"{table}/{name}": array for name, array in parts.items()}
        header = {**self._fingerprint(), "num_updates": self._num_updates(), "step": steps[0]}
        return pack(header, arrays)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Replace all rows by those of a `state_dict`.

        Raises:
            ValueError: the state is that of another collection, or its rows are in a checkpoint of
                a source that is not loaded.
        """
        header, arrays = unpack(state)
        ours = self._fingerprint()
        saved = {name: header.get(name) for name in ours}
        difference = first_difference(saved, ours, "")
        if difference is not None:
            name, theirs, own = difference
            raise ValueError(
                f"state_dict of a collection must have {name[1:]}={own!r}, got {theirs!r}; load it "
                "into a collection that is made with the same arguments"
            )
        for rows in self.fused_rows():
            if header["step"] not in (None, rows.source_step):
                raise ValueError(
                    f"state_dict has no rows, which a source held before step {header['step']}; "
                    "make the collection with source, and call its load before load_state_dict"
                )
        for rows in self.fused_rows():
            of_tables = {
                table: (
                    arrays[f"{table}/rows"],
                    Records(arrays[f"{table}/records"], layout.dim),
                )
                for table, layout in rows.layouts.items()
                if header["step"] is None
            }
            rows.replace_rows(of_tables, header["num_updates"][next(iter(rows.layouts))])

    def _fingerprint(self) -> dict[str, Any]:
        parts = [rows.fingerprint() for rows in self.fused_rows()]
        tables = {name: table for part in parts for name, table in part["tables"].items()}
        return {"optimizer": parts[0]["optimizer"], "tables": tables}

    def _num_updates(self) -> dict[str, int]:
        return {table: rows.num_updates for rows in self.fused_rows() for table in rows.layouts}

    def _anchor(self) -> torch.Tensor | None:
        """Return the anchor of a forward pass; None without gradients, or if rows are frozen.

        Raises:
            ValueError: something treats the rows as parameters.
        """
        # ranks copy all buffers from the first one
        if _num_changes(self._copied) != self._num_copies and not has_ranks():
            raise ValueError(
                "rows of a collection are no parameters, which AveragedModel and others copy; "
                "average the other modules, and look up the rows of the trained model"
            )
        if not (torch.is_grad_enabled() and self.autograd_anchor.requires_grad):
            return None
        self._check_gradient()
        if not self.autograd_anchor._post_accumulate_grad_hooks:
            self.autograd_anchor.register_post_accumulate_grad_hook(self._keep_gradient)
        return self.autograd_anchor

    def _keep_gradient(self, anchor: torch.Tensor) -> None:
        grad = anchor.grad
        self._updated = None if grad is None else (grad, grad._version, grad.item())

    def _check_gradient(self) -> None:
        """Raise ValueError if gradients were changed after rows were updated by them."""
        updated, self._updated = self._updated, None
        if updated is None or has_ranks():
            return
        gradient, version, value = updated
        # GradScaler does not count versions; zeros are those of zero_grad(set_to_none=False)
        is_changed = gradient.item() != value or gradient._version != version
        if is_changed and gradient.item() != 0:
            raise ValueError(
                "gradients were changed after the backward pass, which had updated the rows by "
                "them, as by GradScaler or clip_grad_norm_; update rows by "
                "presage.trainer.embedding.optimizer.RowOptimizer"
            )

    def _apply(self: T, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> T:
        """Leave the rows where they are; raise ValueError for another type or shared memory."""
        rows = next(iter(self.fused_rows()))
        moved = fn(torch.zeros(0, dtype=rows.dtype))
        if moved.dtype != rows.dtype:
            raise ValueError(
                f"rows of a collection must stay {_name(rows.dtype)}, got {_name(moved.dtype)}; "
                "convert the other modules, or make the collection with another dtype"
            )
        if moved.device.type == "cpu" and moved.is_shared():
            raise ValueError(
                "rows of a collection cannot be shared by processes, as share_memory() would; use "
                "ranks of torch.distributed, or presage train --replicas"
            )
        return self


def _num_changes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class EmbeddingBagCollection(Collection, EmbeddingBagCollectionInterface):
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
        source: ExternalRows | None = None,
    ) -> None:
        """Create empty tables.

        Args:
            tables: TorchRec's configs; widths and poolings may differ.
            is_weighted: look-ups have weights; a mean divides by their number, as FBGEMM's does.
            device: cpu or None.
            optimizer: update rule of the rows; None: row-wise Adagrad.
            seed: of the rows' initial values.
            dtype: float32 or float64.
            source: of the rows, from `presage.open_rows`; None: memory.

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
        self._parts: dict[str, list[EmbeddingBagConfig]] = {}
        for table in tables:
            key = f"{table.embedding_dim} {table.pooling.name.lower()}"
            self._parts.setdefault(key, []).append(table)
        self._set_rows(
            {
                key: FusedRows(part, optimizer, seed=seed, dtype=dtype, source=source)
                for key, part in self._parts.items()
            }
        )

    @_outside_of_graphs
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool the rows of each bag and return the vector of each sample's bag.

        Args:
            features: with or without inverse indices.
        """
        parts: list[tuple[Sequence[str], int, torch.Tensor]] = []
        anchor = self._anchor()
        for key, part in self._parts.items():
            rows = self._rows[key]
            names = {t.name: tuple(t.feature_names) for t in part}
            dtype = rows.dtype if self._is_weighted else None
            batch = batch_from_kjt(features, names, weighted=dtype)
            mean = part[0].pooling is PoolingType.MEAN
            step = PooledStep(rows, batch, mean=mean, in_place=anchor is not None)
            (pooled,) = fused_outputs(step, anchor)
            parts.append((step.keys, part[0].embedding_dim, pooled))
        return OrderedKeyedTensor([f for t in self._tables for f in t.feature_names], parts)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the tables."""
        return self._tables

    def is_weighted(self) -> bool:
        """Return whether look-ups have weights."""
        return self._is_weighted


class EmbeddingCollection(Collection, EmbeddingCollectionInterface):
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
        source: ExternalRows | None = None,
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
        rows = FusedRows(self._tables, optimizer, seed=seed, dtype=dtype, source=source)
        self._set_rows({"": rows})

    @_outside_of_graphs
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
        batch = batch_from_kjt(features, names, weighted=None)
        results: dict[str, tuple[JaggedTensor, torch.Tensor | None]] = {}
        anchor = self._anchor()
        step = SequenceStep(self._rows[""], batch, in_place=anchor is not None)
        outputs = fused_outputs(step, anchor)
        for lookup, values in zip(batch.lookups.values(), outputs, strict=True):
            parts = values.split(lookup.values_per_feature)
            for feature, part in zip(lookup.features, parts, strict=True):
                jagged = features[feature]
                indices = jagged.values() if self._need_indices else None
                lists = JaggedTensor(part, lengths=jagged.lengths(), weights=indices)
                group = batch.group_of[feature]
                results[feature] = lists, None if group is None else batch.groups[group].indices
        return results

    @_outside_of_graphs
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


def rows_of(collection: Collection, table: str, rows: torch.Tensor) -> torch.Tensor:
    """Return copies of some rows, (n, dim)."""
    records = _rows_with(collection, table).read({table: rows.numpy()})
    return torch.from_numpy(records[table].values.copy())


def set_rows(
    collection: Collection,
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


def set_learning_rate(collection: Collection, rate: float) -> None:
    """Set the learning rate of the rows from the next update on, for schedules."""
    for rows in collection.fused_rows():
        rows.set_learning_rate(rate)


def _rows_with(collection: Collection, table: str) -> FusedRows:
    return next(rows for rows in collection.fused_rows() if table in rows.layouts)


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


def _check(tables: Sequence[BaseEmbeddingConfig], device: torch.device | None) -> None:
    """Raise ValueError for unsupported configs; warn of ignored settings."""
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(
            f"device must be cpu, where a collection of Presage keeps its rows, got {device}; "
            "leave it out and move the result, or shard TorchRec's as in docs/distributed.md"
        )
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
                "row; set others by presage.trainer.embedding.collections.set_rows",
                stacklevel=3,
            )
