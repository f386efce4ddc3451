"""Models of TorchRec's modules, plain and with computation once per unique tuple or shared row.

DLRM, DLRM_DCN (DCN-v2), SimpleDeepFMNN (DeepFM), and Wide & Deep. Parameters have the names and
shapes of the plain model, and results equal the plain model's up to rounding.

Source: RecD (MLSys 2023) for computing on unique rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.mlp import MLP

from presage.schemas.config.train import TrainConfig
from presage.trainer.data.collate import CollatedBatch
from presage.trainer.data.lookup import Inverse, take
from presage.trainer.data.shared import SharedFeatures
from presage.trainer.data.transfer import to_device
from presage.trainer.embedding.kernels.compiled import CompiledInteractions
from presage.trainer.embedding.kernels.interface import Vectors
from presage.trainer.embedding.kernels.torch_ops import TorchInteractions
from presage.trainer.models.shared_compute import (
    DENSE,
    GroupVectors,
    columns_of,
    dense_vectors,
    first_layer,
    linear_term,
    sum_over_groups,
    to_samples,
    vectors_by_group,
)


def dense_inputs(dense: torch.Tensor) -> torch.Tensor:
    """Return the input of TorchRec's dense MLP, (n, max(num_dense, 1)).

    Without dense features it is a column of ones: interactions always contain the output of the
    dense MLP, which then is one learned vector for all samples.
    """
    return dense if dense.shape[1] else dense.new_ones(dense.shape[0], 1)


def _vectors_by_tuple(
    batch: CollatedBatch,
    dense: torch.Tensor,
    dense_arch: Callable[[torch.Tensor], torch.Tensor],
    embedding: nn.Module,
    features: Sequence[str],
) -> list[GroupVectors]:
    """Return the vectors of a batch by dedup group, first that of the dense features.

    The dense MLP and the look-ups run once per unique tuple.
    """
    pooled = cast(Any, embedding).unique(batch.sparse)
    inputs = dense_vectors(batch, dense)
    bottom = GroupVectors(inputs.name, {DENSE: dense_arch(inputs.vectors[DENSE])})
    return vectors_by_group(batch, {f: pooled[f] for f in features}, bottom)


M = TypeVar("M", bound=nn.Module)


def _build(config: TrainConfig, make: Callable[[], M]) -> M:
    """Return a model of TorchRec whose initial parameters depend on the seed of a job alone.

    Raises:
        ValueError: `top_layers` is empty, which TorchRec's over arch does not support.
    """
    model = config.model
    if not model.top_layers:
        raise ValueError(f"top_layers must not be empty for {model.name}; add a width")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        built = make()
    for name in ("dense_arch", "inter_arch", "over_arch"):  # the embedding has its own dtype
        built.get_submodule(name).to(getattr(torch, config.dtype))
    return built


# ---- DLRM ----
#
# A shared row is a distinct combination of unique tuples
# (`presage.trainer.data.shared.SharedFeatures`). Per shared row, `DlrmModel` computes the bottom
# MLP, the products of its own vectors, and its term of the first top layer, which is a sum over its
# inputs. Products between a sample's vectors and its shared row run row by row, for all samples of
# a row at once.
#
#     combined = [bottom(dense), sparse...]          DLRM's vectors, n of them
#     inputs   = [bottom(dense), combined_a . combined_b for a < b]
#     top[0]   = W_rows inputs_rows (once per row) + W_samples inputs_samples
#
# Sources: DLRM (2019) for the model, RecD (MLSys 2023) for computing on unique rows.


def build_dlrm(config: TrainConfig, num_dense: int, embedding: nn.Module) -> DlrmModel:
    """Build DLRM over an embedding module.

    DLRM (torchrec 1.8) uses two members of the EmbeddingBagCollection interface:
    `embedding_bag_configs()`, with one `embedding_dim` and one interaction vector per feature name,
    and the call itself, whose KeyedTensor it reads by feature name. Two tables must not share a
    feature, or the keys of the KeyedTensor would contain the table name.

    Args:
        config: widths, `embedding_dim`, `dtype`, and the seed of the initial dense parameters.
        num_dense: number of dense features, may be 0.
        embedding: maps a KeyedJaggedTensor to pooled (B, num_features * embedding_dim), one row
            per sample, in `config.dtype`.

    Returns:
        A module from a batch to (B,) logits.

    Raises:
        ValueError: `top_layers` is empty.
    """
    dlrm = _build(config, lambda: DLRM(**_arguments(config, num_dense, embedding)))
    return DlrmModel(dlrm, dedup=config.model.dedup_compute)


def _arguments(config: TrainConfig, num_dense: int, embedding: nn.Module) -> dict[str, Any]:
    return {
        "embedding_bag_collection": embedding,  # of which few methods are used
        "dense_in_features": max(num_dense, 1),
        "dense_arch_layer_sizes": [*config.model.bottom_layers, config.embedding_dim],
        "over_arch_layer_sizes": [*config.model.top_layers, 1],
    }


def interact(rows: Vectors, own: Vectors, inverse: Inverse) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products of two vectors of a row, and of a sample and its row.

    Returns:
        `row_out` and `own_out` of `CompiledInteractions.interact`.
    """
    kernel = CompiledInteractions() if rows.rest.is_cpu else TorchInteractions()
    return _Interact.apply(kernel, inverse, rows.first, rows.rest, own.first, own.rest)


class _Interact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kernel, inverse, *tensors = args
        rows, own = Vectors(*tensors[:2]), Vectors(*tensors[2:])
        width = own.own_width + own.count * rows.count
        row_out = rows.rest.new_empty(len(rows.rest), rows.own_width)
        own_out = own.rest.new_empty(len(own.rest), width)
        kernel.interact(rows, own, inverse, row_out, own_out)
        ctx.kernel, ctx.inverse = kernel, inverse
        ctx.save_for_backward(*tensors)
        return row_out, own_out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors
        out: list[Any] = [None if t is None else torch.empty_like(t) for t in tensors]
        ctx.kernel.interact_back(
            Vectors(*tensors[:2]),
            Vectors(*tensors[2:]),
            ctx.inverse,
            (grads[0].contiguous(), grads[1].contiguous()),
            (Vectors(*out[:2]), Vectors(*out[2:])),
        )
        return None, None, *out


@dataclass(frozen=True, slots=True)
class _Columns:
    """Columns of the first top layer that shared rows and samples fill.

    Attributes:
        rows: (r,) of shared rows; those of the bottom MLP first if it is shared.
        own: (s,) of samples, in the same order, then products with the shared row.
    """

    rows: torch.Tensor
    own: torch.Tensor


def top_columns(row_vectors: tuple[int, ...], own_vectors: tuple[int, ...], dim: int) -> _Columns:
    """Return the columns of DLRM's first top layer that shared rows and samples fill.

    Args:
        row_vectors: indices of the shared vectors among DLRM's; 0 is the bottom MLP's.
        own_vectors: indices of the per-sample vectors.
        dim: width of a vector.
    """
    count = len(row_vectors) + len(own_vectors)
    first, second = torch.triu_indices(count, count, offset=1)
    column = torch.zeros(count, count, dtype=torch.int64)
    column[first, second] = column[second, first] = dim + torch.arange(len(first))
    rows = torch.tensor(row_vectors, dtype=torch.int64)
    own = torch.tensor(own_vectors, dtype=torch.int64)
    row_pairs = torch.triu_indices(len(rows), len(rows), offset=1)
    own_pairs = torch.triu_indices(len(own), len(own), offset=1)
    bottom = torch.arange(dim)
    of_rows = column[rows[row_pairs[0]], rows[row_pairs[1]]]
    of_own = column[own[own_pairs[0]], own[own_pairs[1]]]
    crossed = column[own[:, None], rows[None, :]].flatten()
    return _Columns(
        torch.cat([bottom, of_rows]) if 0 in row_vectors else of_rows,
        torch.cat([*([bottom] if 0 in own_vectors else []), of_own, crossed]),
    )


class DlrmModel(nn.Module):
    """DLRM on a batch, optionally with computation per shared row."""

    def __init__(self, dlrm: DLRM, *, dedup: bool) -> None:
        super().__init__()
        self.dlrm = dlrm
        self.dedup = dedup
        self._columns: dict[tuple[tuple[int, ...], tuple[int, ...]], _Columns] = {}

    def forward(self, batch: CollatedBatch) -> torch.Tensor:
        """Return (B,) logits."""
        shared = batch.shared if self.dedup else None
        if shared is None:
            return self.dlrm(dense_inputs(batch.dense), batch.sparse).squeeze(1)
        embedding: Any = self.dlrm.sparse_arch.embedding_bag_collection
        rows, own = embedding.pool_shared(batch.sparse)
        dense = batch.dense if shared.shared_dense is None else shared.shared_dense
        bottom = self.dlrm.dense_arch(dense_inputs(dense))
        by_row, by_sample = (None, bottom) if shared.shared_dense is None else (bottom, None)
        columns = self._columns_of(shared, rows)
        row_inputs, own_inputs = interact(
            Vectors(by_row, rows), Vectors(by_sample, own), shared.rows
        )
        top = cast(Any, self.dlrm.over_arch).model
        first = top[0]._mlp[0]
        weight, bias = first._linear.weight, first._linear.bias
        of_rows = F.linear(row_inputs, weight.index_select(1, columns.rows), bias)
        own_weight = weight.index_select(1, columns.own)
        hidden = first._activation_fn(
            torch.addmm(take(of_rows, shared.rows), own_inputs, own_weight.t())
        )
        for layer in top[0]._mlp[1:]:
            hidden = layer(hidden)
        return top[1](hidden).squeeze(1)

    def _columns_of(self, shared: SharedFeatures, like: torch.Tensor) -> _Columns:
        features = self.dlrm.sparse_arch.sparse_feature_names
        rows = tuple(1 + features.index(f) for f in shared.shared_features)
        own = tuple(1 + features.index(f) for f in shared.per_sample_features)
        if shared.shared_dense is None:
            own = (0, *own)
        else:
            rows = (0, *rows)
        if (rows, own) not in self._columns:
            self._columns[rows, own] = to_device(top_columns(rows, own, like.shape[2]), like.device)
        return self._columns[rows, own]


# ---- DCN-v2 ----
#
# TorchRec's DLRM_DCN: a low-rank cross network (DCN-v2) instead of DLRM's products.
#
#     x_0     = [bottom(dense), sparse...]
#     x_{l+1} = x_0 * (W_l V_l x_l + b_l) + x_l
#
# Every layer needs x_0 of each sample, so only the bottom MLP and the first product, V_0 x_0, are
# computed once per unique tuple.
#
# Sources: DCN-v2 (WWW 2021), RecD (MLSys 2023).


class DcnModel(nn.Module):
    """DLRM_DCN on a batch, optionally with computation per unique tuple."""

    def __init__(self, dcn: DLRM_DCN, *, dedup: bool) -> None:
        super().__init__()
        self.dcn = dcn
        self.dedup = dedup

    def forward(self, batch: CollatedBatch) -> torch.Tensor:
        """Return (B,) logits."""
        dense = dense_inputs(batch.dense)
        if not (self.dedup and batch.groups):
            return self.dcn(dense, batch.sparse).squeeze(1)
        sparse = self.dcn.sparse_arch
        groups = _vectors_by_tuple(
            batch,
            dense,
            self.dcn.dense_arch,
            sparse.embedding_bag_collection,
            sparse.sparse_feature_names,
        )
        return self.dcn.over_arch(self._crossed(batch, groups)).squeeze(1)

    def _crossed(self, batch: CollatedBatch, groups: list[GroupVectors]) -> torch.Tensor:
        """Return the cross network's output, (num_samples, num_vectors * dim)."""
        cross: Any = self.dcn.inter_arch.crossnet
        names = (DENSE, *self.dcn.sparse_arch.sparse_feature_names)
        columns = columns_of(dict.fromkeys(names, self.dcn.sparse_arch.D))
        start = _concatenated(batch, groups, names)
        products = sum_over_groups(
            batch, groups, lambda group: linear_term(group, cross.V_kernels[0], columns)
        )
        x = start
        for layer, (v, w, bias) in enumerate(
            zip(cross.V_kernels, cross.W_kernels, cross.bias, strict=True)
        ):
            products = F.linear(x, v) if layer else products
            x = start * (F.linear(products, w) + bias) + x
        return x


def _concatenated(
    batch: CollatedBatch, groups: list[GroupVectors], names: tuple[str, ...]
) -> torch.Tensor:
    """Return the vectors of each sample side by side, in the order of `names`."""
    vectors: dict[str, torch.Tensor] = {}
    for group in groups:
        widths = [v.shape[1] for v in group.vectors.values()]
        wide = to_samples(batch, group.name, group.flat).split(widths, dim=1)
        vectors.update(zip(group.vectors, wide, strict=True))
    return torch.cat([vectors[name] for name in names], dim=1)


def build_dcn(config: TrainConfig, num_dense: int, embedding: nn.Module) -> DcnModel:
    """Build DLRM_DCN over an embedding module; see `build_dlrm`.

    Raises:
        ValueError: `top_layers` is empty.
    """
    arguments, model = _arguments(config, num_dense, embedding), config.model
    arguments |= {"dcn_num_layers": model.cross_layers, "dcn_low_rank_dim": model.cross_rank}
    return DcnModel(_build(config, lambda: DLRM_DCN(**arguments)), dedup=model.dedup_compute)


# ---- DeepFM ----
#
# TorchRec's SimpleDeepFMNN without its last sigmoid, which the loss applies.
#
#     x     = [bottom(dense), sparse...], all numbers side by side
#     fm    = ((sum of x)**2 - sum of x**2) / 2
#     logit = over [bottom(dense), deep(x), fm]
#
# All three start with sums over x, so each dedup group's terms of the first deep layer, of both
# sums and of the over layer are computed once per unique tuple and expanded to samples as one
# vector.
#
# Sources: DeepFM (IJCAI 2017), RecD (MLSys 2023).


class DeepFmModel(nn.Module):
    """SimpleDeepFMNN on a batch, optionally with computation per unique tuple."""

    def __init__(self, deepfm: SimpleDeepFMNN, *, dedup: bool) -> None:
        super().__init__()
        self.deepfm = deepfm
        self.dedup = dedup

    def forward(self, batch: CollatedBatch) -> torch.Tensor:
        """Return (B,) logits."""
        dense = dense_inputs(batch.dense)
        if not (self.dedup and batch.groups):
            return self.deepfm(dense, batch.sparse).squeeze(1)
        inter, over = self.deepfm.inter_arch, cast(Any, self.deepfm.over_arch.model)[0]
        names = inter.sparse_feature_names
        embedding = self.deepfm.sparse_arch.embedding_bag_collection
        groups = _vectors_by_tuple(batch, dense, self.deepfm.dense_arch, embedding, names)
        first, rest = first_layer(inter.deep_fm.dense_module)
        dim = groups[0].vectors[DENSE].shape[1]  # the dense features' group is the first
        columns = columns_of(dict.fromkeys((DENSE, *names), dim))

        def term_of(group: GroupVectors) -> torch.Tensor:
            x = group.flat
            dense_logit = x.new_zeros(len(x), 1)
            if DENSE in group.vectors:
                dense_logit = F.linear(group.vectors[DENSE], over.weight[:, :dim])
            sums = [x.sum(1, keepdim=True), (x * x).sum(1, keepdim=True)]
            return torch.cat([linear_term(group, first.weight, columns), *sums, dense_logit], 1)

        total = sum_over_groups(batch, groups, term_of)
        deep = rest(total[:, :-3] + first.bias)
        fm = (total[:, -3] ** 2 - total[:, -2]) / 2
        own = torch.cat([deep, fm[:, None]], dim=1)
        return F.linear(own, over.weight[:, dim:], over.bias).squeeze(1) + total[:, -1]


def build_deepfm(config: TrainConfig, num_dense: int, embedding: nn.Module) -> DeepFmModel:
    """Build SimpleDeepFMNN over an embedding module; see `build_dlrm`.

    TorchRec's model has one hidden dense layer and one deep layer; for other numbers of
    `bottom_layers` or `top_layers` they are replaced by TorchRec's MLP.

    Raises:
        ValueError: `top_layers` is empty.
    """
    model, dim = config.model, config.embedding_dim

    def make() -> SimpleDeepFMNN:
        deepfm = SimpleDeepFMNN(
            num_dense_features=max(num_dense, 1),
            embedding_bag_collection=cast(Any, embedding),
            hidden_layer_size=(*model.bottom_layers, dim)[0],
            deep_fm_dimension=model.top_layers[-1],
        )
        if len(model.bottom_layers) != 1:
            deepfm.dense_arch.model = MLP(max(num_dense, 1), [*model.bottom_layers, dim])
        deep: Any = deepfm.inter_arch.deep_fm
        if len(model.top_layers) != 1:
            deep.dense_module = MLP(deep.dense_module[0].in_features, [*model.top_layers])
        over: Any = deepfm.over_arch
        over.model = nn.Sequential(over.model[0])
        return deepfm

    return DeepFmModel(_build(config, make), dedup=model.dedup_compute)


# ---- Wide & Deep ----
#
# Wide & Deep of TorchRec's modules: a weight per id beside an MLP over embeddings.
#
# The first number of each row is the id's weight in the wide part, the others are its embedding:
#
#     wide  = sum over features of their rows' first number + linear(dense)
#     deep  = MLP [dense, the other numbers of each feature]
#     logit = wide + deep
#
# Both start with sums over features, so each dedup group's terms are computed once per unique
# tuple. Wide weights have the initial values of embeddings.
#
# Sources: Wide & Deep (2016), RecD (MLSys 2023).


class WideDeepModel(nn.Module):
    """A linear part and an MLP over one embedding module."""

    def __init__(
        self, config: TrainConfig, features: tuple[str, ...], num_dense: int, embedding: nn.Module
    ) -> None:
        super().__init__()
        model, width = config.model, config.embedding_dim - 1
        self.features, self.num_dense, self.dedup = features, num_dense, model.dedup_compute
        widths = {DENSE: num_dense} if num_dense else {}
        self._columns = columns_of(widths | dict.fromkeys(features, width))
        self.wide = nn.Linear(num_dense, 1) if num_dense else None
        in_features = num_dense + len(features) * width
        layers = [] if not model.top_layers else [MLP(in_features, [*model.top_layers])]
        last = (in_features, *model.top_layers)[-1]
        self.deep = nn.Sequential(*layers, nn.Linear(last, 1))
        self.to(getattr(torch, config.dtype))  # before the embedding, which has its own dtype
        self.embedding = embedding

    def forward(self, batch: CollatedBatch) -> torch.Tensor:
        """Return (B,) logits."""
        if self.dedup and batch.groups:
            return self._forward_by_tuple(batch)
        pooled = self.embedding(batch.sparse).to_dict()
        vectors = [pooled[f] for f in self.features]
        inputs = [batch.dense] if self.num_dense else []
        inputs += [v[:, 1:] for v in vectors]
        wide = torch.stack([v[:, 0] for v in vectors]).sum(0)
        if self.wide is not None:
            wide = wide + self.wide(batch.dense).squeeze(1)
        return wide + self.deep(torch.cat(inputs, dim=1)).squeeze(1)

    def _forward_by_tuple(self, batch: CollatedBatch) -> torch.Tensor:
        pooled: Mapping[str, torch.Tensor] = cast(Any, self.embedding).unique(batch.sparse)
        dense = dense_vectors(batch, batch.dense) if self.num_dense else None
        groups = vectors_by_group(batch, {f: pooled[f] for f in self.features}, dense)
        first, rest = first_layer(self.deep)

        def term_of(group: GroupVectors) -> torch.Tensor:
            sparse = {f: v for f, v in group.vectors.items() if f != DENSE}
            wide = [v[:, :1] for v in sparse.values()]
            inputs = {f: v[:, 1:] for f, v in sparse.items()}
            if DENSE in group.vectors and self.wide is not None:
                inputs[DENSE] = group.vectors[DENSE]
                wide.append(F.linear(inputs[DENSE], self.wide.weight))
            deep = linear_term(GroupVectors(group.name, inputs), first.weight, self._columns)
            return torch.cat([deep, torch.stack(wide).sum(0)], dim=1)

        total = sum_over_groups(batch, groups, term_of)
        deep = rest(total[:, :-1] + first.bias)
        logits = total[:, -1] + deep.squeeze(1)
        return logits if self.wide is None else logits + self.wide.bias


def build_wide_deep(
    config: TrainConfig, features: tuple[str, ...], num_dense: int, embedding: nn.Module
) -> WideDeepModel:
    """Build Wide & Deep over an embedding module.

    Args:
        config: `top_layers` of the deep part, and the seed of the initial dense parameters.
        features: sparse features in concatenation order.
        num_dense: dense features of a batch, may be 0.
        embedding: pooled rows of `config.embedding_dim` numbers, in `config.dtype`.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        return WideDeepModel(config, features, num_dense, embedding)
