"""Causal attention over a history, computed once for all samples that share its events.

Each event attends to those before it, and each target to the events that its sample sees. Targets
are read by nothing but themselves, so any number of them shares the events of one run. The last
layer computes targets alone.

Source: HSTU (ICML 2024): pointwise attention by SiLU with relative positions and times. Sums are
divided by a constant, and positions are counted between events, so that an event is the same for
each target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from presage.schemas.config.train import TrainConfig
from presage.trainer.data.collate import CollatedBatch
from presage.trainer.data.decode import BatchSpec
from presage.trainer.data.history_batch import HistoryBatch
from presage.trainer.models.attention import TargetModel

TIME_BUCKETS = 32
"""Differences of times in ticks are put into buckets by their logarithm to the base 2."""
MAX_SCORES = 1 << 22
"""Scores of a head computed at once; each takes some 50 bytes until the backward pass."""


@dataclass(frozen=True, slots=True)
class RunBlock:
    """Runs of similar length in a padded block, with the targets that read them.

    Attributes:
        events: (n, L) int64, the event at each place; any for padding.
        targets: (n, T) int64, the sample of each target; any for padding.
        places: (num_events + num_targets,) int64, where these are in (n, L + T), events first.
        scales: (n, L + T, L) in the type of the model: 1 / most_events where a query reads an
            event, 0 elsewhere.
        distances: (n, L + T, L) int64, events from each event to a query, at least 0.
        buckets: (n, L + T, L) int64, bucket of the time between them.
    """

    events: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    scales: torch.Tensor
    distances: torch.Tensor
    buckets: torch.Tensor


@dataclass(frozen=True, slots=True)
class RunLayout:
    """The runs of a batch in blocks.

    Attributes:
        blocks: of runs.
        order: (E + B,) int64, where each event and each target is among those of all blocks, events
            first in each.
        targets: (B,) int64, where each target is among the targets of all blocks.
    """

    blocks: Sequence[RunBlock]
    order: torch.Tensor
    targets: torch.Tensor


def lay_out_runs(
    history: HistoryBatch, run_of: torch.Tensor, most_events: int, dtype: torch.dtype
) -> RunLayout:
    """Lay out the runs of a batch.

    Args:
        history: of the batch.
        run_of: (B,) int64, the run of each sample, ascending.
        most_events: of a window, by which sums are divided; longer distances count as it.
        dtype: of the model.
    """
    device = history.ticks.device
    runs, ends = history.runs, history.ends
    lengths, counts = runs.diff(), torch.bincount(run_of, minlength=len(runs) - 1)
    first_target = counts.cumsum(0) - counts
    blocks: list[RunBlock] = []
    for chosen, length, num_targets in _blocks_of(lengths.tolist(), counts.tolist()):
        of_block = torch.tensor(chosen, device=device)
        low, columns = runs[of_block, None], torch.arange(length, device=device)
        is_event = columns < lengths[of_block, None]
        events = torch.where(is_event, low + columns, 0)
        slots = torch.arange(num_targets, device=device)
        is_target = slots < counts[of_block, None]
        targets = torch.where(is_target, first_target[of_block, None] + slots, 0)
        # a target comes after the events that it sees, at its own time
        place = torch.cat([columns.expand(len(chosen), -1), ends[targets] - low], 1)
        start = torch.cat([torch.zeros_like(events), history.starts[targets] - low], 1)
        end = torch.cat([columns.expand(len(chosen), -1) + 1, ends[targets] - low], 1)
        is_query = torch.cat([is_event, is_target], 1)
        reads = (columns >= start[..., None]) & (columns < end[..., None])
        reads &= is_query[..., None] & is_event[:, None]
        ticks = history.ticks[events] if len(history.ticks) else torch.zeros_like(events)
        times = torch.cat([ticks, history.times[targets]], 1)
        blocks.append(
            RunBlock(
                events,
                targets,
                torch.cat(
                    [
                        _flat(is_event, length + num_targets, 0),
                        _flat(is_target, length + num_targets, length),
                    ]
                ),
                reads.to(dtype) / most_events,
                (place[..., None] - columns).clamp(0, most_events),
                time_buckets(times[..., None] - ticks[:, None]),
            )
        )
    return _layout_of(blocks, lengths, counts)


def _flat(is_filled: torch.Tensor, width: int, first: int) -> torch.Tensor:
    """Return where the filled places are in rows of `width`, from column `first` on."""
    rows, columns = is_filled.nonzero(as_tuple=True)
    return rows * width + columns + first


def _blocks_of(
    lengths: Sequence[int], counts: Sequence[int]
) -> Iterator[tuple[list[int], int, int]]:
    """Yield runs, the length of the longest and the targets of the one that has most."""
    order = sorted(range(len(lengths)), key=lambda run: (lengths[run].bit_length(), counts[run]))
    chosen: list[int] = []
    length = num_targets = 0
    for run in order:
        longest, most = max(length, lengths[run]), max(num_targets, counts[run])
        is_longer = bool(chosen) and lengths[run].bit_length() > length.bit_length()
        if chosen and (
            is_longer or (len(chosen) + 1) * max(1, longest) * (longest + most) > MAX_SCORES
        ):
            yield chosen, length, num_targets
            chosen, longest, most = [], lengths[run], counts[run]
        chosen.append(run)
        length, num_targets = longest, most
    if chosen:
        yield chosen, length, num_targets


def _layout_of(
    blocks: Sequence[RunBlock], lengths: torch.Tensor, counts: torch.Tensor
) -> RunLayout:
    num_events, num_targets = int(lengths.sum()), int(counts.sum())
    device = lengths.device
    order = torch.empty(num_events + num_targets, dtype=torch.int64, device=device)
    of_targets = torch.empty(num_targets, dtype=torch.int64, device=device)
    first = first_target = 0
    for block in blocks:
        width = block.events.shape[1] + block.targets.shape[1]
        rows, columns = block.places // width, block.places % width
        is_event = columns < block.events.shape[1]
        events = block.events[rows[is_event], columns[is_event]]
        targets = block.targets[rows[~is_event], columns[~is_event] - block.events.shape[1]]
        count = len(block.places)
        order[torch.cat([events, targets + num_events])] = torch.arange(
            first, first + count, device=device
        )
        of_targets[targets] = torch.arange(first_target, first_target + len(targets), device=device)
        first, first_target = first + count, first_target + len(targets)
    return RunLayout(blocks, order, of_targets)


def time_buckets(ticks: torch.Tensor) -> torch.Tensor:
    """Return the bucket of each difference of times: 0 for 0, else 1 + floor(log2(ticks)).

    Example:
        >>> time_buckets(torch.tensor([-1, 0, 1, 2, 3, 4])).tolist()
        [0, 0, 1, 2, 2, 3]
    """
    exponents = torch.frexp(ticks.clamp(min=0).double())[1]
    return exponents.clamp(max=TIME_BUCKETS - 1).long()


class HstuLayer(nn.Module):
    """Events read earlier ones and themselves, targets the events that they see and themselves."""

    def __init__(self, dim: int, num_heads: int, most_events: int) -> None:
        super().__init__()
        self.num_heads, self.most_events = num_heads, most_events
        self.norm = nn.LayerNorm(dim)
        self.project = nn.Linear(dim, 4 * dim)
        self.distances = nn.Parameter(torch.zeros(most_events + 1, num_heads))
        self.times = nn.Parameter(torch.zeros(TIME_BUCKETS, num_heads))
        self.mix_norm = nn.LayerNorm(dim)
        self.mix = nn.Linear(dim, dim)

    def forward(
        self,
        events: torch.Tensor,
        targets: torch.Tensor,
        layout: RunLayout,
        *,
        is_last: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return events and targets of the next layer; of the last one only the targets differ.

        Args:
            events: (E, dim).
            targets: (B, dim).
            layout: of the batch.
            is_last: whether events are not read again.
        """
        num_events, dim = events.shape
        both = torch.cat([events, targets])
        gate, value, query, key = F.silu(self.project(self.norm(both))).chunk(4, dim=1)
        read = [
            self._read(block, query, key, value, num_events, only_targets=is_last)
            for block in layout.blocks
        ]
        order = layout.targets if is_last else layout.order
        summed = torch.cat(read).index_select(0, order)
        first = num_events if is_last else 0
        own_score = (query[num_events:] * key[num_events:]).view(-1, self.num_heads, self._width)
        bias = self.distances[0] + self.times[0]
        own = F.silu(own_score.sum(2) * self._width**-0.5 + bias) / self.most_events
        own = own.unsqueeze(2) * value[num_events:].view(-1, self.num_heads, self._width)
        own = own.flatten(1)
        if not is_last:
            own = torch.cat([own.new_zeros(num_events, dim), own])
        mixed = both[first:] + self.mix(self.mix_norm(summed + own) * gate[first:])
        if is_last:
            return events, mixed
        return mixed[:num_events], mixed[num_events:]

    @property
    def _width(self) -> int:
        return self.mix.in_features // self.num_heads

    def _read(
        self,
        block: RunBlock,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        num_events: int,
        *,
        only_targets: bool,
    ) -> torch.Tensor:
        """Return (num_queries, dim), the sums over the events that each query of a block reads."""
        length = block.events.shape[1]
        queries = block.targets + num_events
        first = length if only_targets else 0
        if not only_targets:
            queries = torch.cat([block.events, queries], 1)
        places = block.places
        width = length + block.targets.shape[1]
        if only_targets:
            columns = places % width
            places = places // width * block.targets.shape[1] + columns - length
            places = places[columns >= length]
        if not length:
            return value.new_zeros(len(places), value.shape[1])
        q, k, v = (
            self._heads(rows, each)
            for rows, each in ((queries, query), (block.events, key), (block.events, value))
        )
        bias = self.distances[block.distances[:, first:]] + self.times[block.buckets[:, first:]]
        scores = q @ k.transpose(2, 3) * self._width**-0.5 + bias.permute(0, 3, 1, 2)
        weights = F.silu(scores) * block.scales[:, None, first:]
        read = (weights @ v).transpose(1, 2).flatten(2)
        return read.reshape(-1, read.shape[2]).index_select(0, places)

    def _heads(self, rows: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return (n, num_heads, L, width) of (n, L) rows."""
        chosen = vectors.index_select(0, rows.flatten())
        return chosen.view(*rows.shape, self.num_heads, self._width).transpose(1, 2)


class HstuModel(TargetModel):
    """Layers of causal attention over a history and the target."""

    def __init__(
        self,
        config: TrainConfig,
        features: tuple[str, ...],
        num_dense: int,
        embedding: nn.Module,
        columns: tuple[str, ...],
        group: str,
    ) -> None:
        """Build the layers.

        Args:
            config: of the model.
            features: sparse features in concatenation order, without those of the history.
            num_dense: number of dense features.
            embedding: of all features.
            columns: features of the history, whose rows are added.
            group: dedup group of them.
        """
        super().__init__(config, features, num_dense, embedding)
        self.columns, self.group = columns, group

    def build_reading(self, config: TrainConfig) -> None:
        """Make the layers."""
        model, window = config.model, config.histories[self.history]
        self.most_events = window.length + window.step - 1
        self.layers = nn.ModuleList(
            HstuLayer(config.embedding_dim, model.num_heads, self.most_events)
            for _ in range(model.num_layers)
        )

    def read(self, batch: CollatedBatch, embedding: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return (B, dim), the target after the last layer."""
        history = batch.histories[self.history]
        inverse = batch.groups.get(self.group)
        device = targets.device
        run_of = torch.arange(len(targets), device=device) if inverse is None else inverse.indices
        layout = lay_out_runs(history, run_of, self.most_events, targets.dtype)
        rows = [embedding.sequence(batch.sparse, feature)[0] for feature in self.columns]
        events = torch.stack(rows).sum(0)
        for number, layer in enumerate(self.layers, 1):
            is_last = number == len(self.layers)
            events, targets = layer(events, targets, layout, is_last=is_last)
        return targets


def build(config: TrainConfig, spec: BatchSpec, embedding: nn.Module) -> HstuModel:
    """Build the model over an embedding module.

    Args:
        config: `model.history` and `model.target`, and the seed of the initial dense parameters.
        spec: columns of a batch.
        embedding: with the look-ups of `presage.trainer.embedding.module.Embedding`, in
            `config.dtype`.

    Raises:
        ValueError: the target is no stored sparse feature, or the history has no column with a
            table.
    """
    model = config.model
    [history] = [h for h in spec.histories if h.name == model.history]
    columns = tuple(history.features.values())
    features = tuple(f for f in spec.sparse if f not in columns)
    if not columns:
        raise ValueError(
            f"model.history must have a column with a table, got {model.history!r}; name one in "
            f"data.histories.{model.history}.tables"
        )
    if model.target not in spec.stored_sparse:
        raise ValueError(
            f"model.target must be a sparse feature of samples, got {model.target!r}; "
            f"use one of {', '.join(spec.stored_sparse)}"
        )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        return HstuModel(config, features, len(spec.dense), embedding, columns, history.group)
