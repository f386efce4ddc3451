"""The embedding module on a device: a step reads and writes the rows of all tables as one block.

    rows of tables  ->  records (num_rows, dim + state_width)     one gather
    records         ->  bags of all features                      one embedding_bag
    bags            ->  what the model reads                      one take per dedup group
    gradients of bags -> gradients of rows, the update rule       one embedding_bag
    records         ->  rows of tables                            one scatter

Nothing here asks the device for a number. Sums run over transposed indices, in order, so that
they have the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
import torch

from presage.schemas.config.train import TrainConfig
from presage.trainer.data.collate import CollatedBatch, Microbatches, single_microbatch
from presage.trainer.data.lookup import Inverse, segment_sums, take, transpose_on_device
from presage.trainer.data.shared import SharedFeatures
from presage.trainer.data.transfer import host_block, upload
from presage.trainer.embedding.cache import RowsOfTables, RowSource
from presage.trainer.embedding.device_cache import DeviceCache
from presage.trainer.embedding.kernels.torch_ops import update_rows
from presage.trainer.embedding.module import Embedding, TableSpec
from presage.trainer.stores.store import GatheredRows, Records, RowReader


class HostRows:
    """Rows of a source in host memory, copied to a device and back in each step."""

    def __init__(self, source: RowSource, device: torch.device, dim: int) -> None:
        self._source, self._device, self._dim = source, device, dim
        self._gathered: Mapping[str, GatheredRows] = {}

    def gather_block(self, train_step: int, rows: RowsOfTables) -> torch.Tensor:
        """Return (num_rows, dim + state_width), rows of all tables one after the other."""
        self._gathered = self._source.gather(train_step, rows)
        return upload_rows([self._gathered[table] for table in rows], self._device)

    def release_block(self, train_step: int, rows: RowsOfTables, block: torch.Tensor) -> None:
        """Copy the updated rows back."""
        num_rows = {table: len(ids) for table, ids in rows.items()}
        downloaded = split_records(block, num_rows, self._dim)
        for table, records in downloaded.items():
            self._gathered[table].put(records)
        self._source.release(train_step, rows)


def upload_rows(gathered: Sequence[GatheredRows], device: torch.device) -> torch.Tensor:
    """Return a copy of the rows of all tables on a device, (num_rows, dim + state_width)."""
    first = torch.from_numpy(gathered[0].records.block)
    block = host_block((sum(map(len, gathered)), first.shape[1]), first.dtype, device)
    np.concatenate([each.take(slice(None)).block for each in gathered], out=block.numpy())
    return upload(block, device)


def split_records(block: torch.Tensor, num_rows: Mapping[str, int], dim: int) -> dict[str, Records]:
    """Return copies in host memory of the rows of each table; waits for the device.

    Args:
        block: (num_rows, dim + state_width), rows of all tables one after the other.
        num_rows: by table.
        dim: width of the values.
    """
    array = block.cpu().numpy()
    parts = np.split(array, np.cumsum(list(num_rows.values()))[:-1])
    return {table: Records(part, dim) for table, part in zip(num_rows, parts, strict=True)}


class DeviceEmbedding(Embedding):
    """The embedding module on a device."""

    def __init__(
        self,
        tables: tuple[TableSpec, ...],
        config: TrainConfig,
        source: RowSource,
        device: torch.device,
        *,
        steps_before: int = 0,
    ) -> None:
        """Keep the arguments; see `Embedding`."""
        super().__init__(tables, config, source, steps_before=steps_before)
        self.device = device
        self._block = torch.empty(0)
        self.set_source(source)

    def set_source(self, source: RowSource) -> None:
        """Gather rows from another source from now on."""
        super().set_source(source)
        on_device = isinstance(source, DeviceCache)
        self._device_source = (
            source if on_device else HostRows(source, self.device, self._config.embedding_dim)
        )

    def open(self, microbatches: Microbatches) -> None:
        """Gather the rows of a step for look-ups of its microbatch, which is on the device."""
        step, rows = microbatches.step.train_step, microbatches.rows
        self.open_block(microbatches, self._device_source.gather_block(step, rows))

    def open_copies(self, batch: CollatedBatch, reader: RowReader) -> None:
        """Open copies of the rows of a batch, for evaluation."""
        microbatches = single_microbatch(batch)
        records = reader.fetch(batch.step.train_step, microbatches.rows)
        gathered = [GatheredRows(records[table]) for table in microbatches.rows]
        self.open_block(microbatches, upload_rows(gathered, self.device))

    def update_from_backward(self) -> None:
        """Update the rows of the only microbatch by their gradients, and release them."""
        microbatches = self._open_microbatches()
        [lookups] = self._lookups
        dim = self._config.embedding_dim
        values, state = self._block[:, :dim], self._block[:, dim:]
        update_rows(self._rule(microbatches), values, state, lookups.sum_gradients())
        step, rows = microbatches.step.train_step, microbatches.rows
        self._device_source.release_block(step, rows, self._block)
        self._lookups, self._microbatches = [], None

    def open_block(self, microbatches: Microbatches, block: torch.Tensor) -> list[DeviceLookups]:
        """Open microbatches on rows that are on the device, and return the look-ups of each.

        Args:
            microbatches: on the device.
            block: (num_rows, dim + state_width), rows of all tables one after the other.
        """
        self._microbatches, self._block = microbatches, block
        values = block[:, : self._config.embedding_dim].contiguous()
        self._lookups = [
            DeviceLookups(batch, values, mean=self._mean) for batch in microbatches.batches
        ]
        return self._lookups


class DeviceLookups:
    """Look-ups of a microbatch among the rows of its step, all of them at once."""

    def __init__(self, batch: CollatedBatch, values: torch.Tensor, *, mean: bool) -> None:
        """Look up nothing yet.

        Args:
            batch: on the device.
            values: (num_rows, dim), the rows of the step, all tables one after the other.
            mean: divide by the length of each bag.
        """
        inputs = batch.device_inputs
        assert inputs is not None, "the batch is on the device"
        self.batch = batch
        self._lookups = inputs.lookups
        numbers = inputs.row_numbers
        self._values = values if numbers is None else values.index_select(0, numbers)
        self._mean = mean and inputs.lookups.longest_bag > 1
        self._scales: torch.Tensor | None = None
        self._bags: torch.Tensor | None = None  # requires grad, as do the entries
        self._entries: dict[str, torch.Tensor] = {}

    @property
    def keys(self) -> tuple[str, ...]:
        """Features in the order of `pool`."""
        return self.batch.layout.keys

    def pool(self) -> torch.Tensor:
        """Return the vectors of each sample, (num_samples, num_features * dim)."""
        return self._columns(self.keys, self.batch.num_samples, self.batch.groups).flatten(1)

    def unique(self) -> dict[str, torch.Tensor]:
        """Return the pooled rows of each feature, one bag per unique tuple."""
        bags = self._pooled_bags().split(self._lookups.bags_per_feature)
        return dict(zip(self._lookups.features, bags, strict=True))

    def pool_shared(self, shared: SharedFeatures) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pooled rows of shared and of per-sample features."""
        groups, num_samples = self.batch.groups, self.batch.num_samples
        return (
            self._columns(shared.shared_features, shared.num_rows, {**groups, **shared.tuples}),
            self._columns(shared.per_sample_features, num_samples, groups),
        )

    @property
    def autograd_inputs(self) -> list[torch.Tensor]:
        """What was looked up, to pass to `torch.autograd.grad`; see `set_gradients`."""
        return [*([] if self._bags is None else [self._bags]), *self._entries.values()]

    def set_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Set the gradients of `autograd_inputs`, which `torch.autograd.grad` does not store."""
        for tensor, gradient in zip(self.autograd_inputs, gradients, strict=True):
            tensor.grad = gradient

    def unpooled(self, table: str, feature: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of a feature and the offsets of its bags."""
        values, bags = self._lookups.slices_of(feature)
        offsets = self._lookups.bag_offsets[bags.start : bags.stop + 1]
        if feature not in self._entries:
            entries = self._values.index_select(0, self._lookups.positions[values])
            self._entries[feature] = entries.requires_grad_()
        return self._entries[feature], (offsets - offsets[0]).long()

    def sum_gradients(self) -> torch.Tensor:
        """Return the gradient of each row, (num_rows, dim)."""
        lookup, gradient = self._lookups, None if self._bags is None else self._bags.grad
        sums = self._values.new_zeros(len(lookup.rows), self._values.shape[1])
        if gradient is not None:
            gradient = gradient if self._scales is None else gradient * self._scales
            sums = segment_sums(
                gradient, lookup.readers, lookup.reader_offsets, lookup.reader_weights
            )
        for feature, entries in self._entries.items():
            if entries.grad is not None:
                rows = lookup.positions[lookup.slices_of(feature)[0]]
                order, offsets = transpose_on_device(rows, len(lookup.rows))
                sums = sums + segment_sums(entries.grad, order, offsets)
        return sums

    def _pooled_bags(self) -> torch.Tensor:
        """Return the pooled rows of all features, (num_bags, dim), one feature after the other."""
        if self._bags is None:
            lookup = self._lookups
            bags = segment_sums(
                self._values, lookup.positions, lookup.bag_offsets, lookup.per_sample_weights
            )
            if self._mean:
                lengths = lookup.bag_offsets.diff().clamp(min=1).to(bags.dtype)
                self._scales = lengths.reciprocal().unsqueeze(1)
                bags *= self._scales
            self._bags = bags.requires_grad_()
        return self._bags

    def _columns(
        self, features: Sequence[str], count: int, inverse_of: Mapping[str, Inverse | None]
    ) -> torch.Tensor:
        """Return the vectors of features, (count, num_features, dim).

        Args:
            features: side by side, those of a group together.
            count: samples or shared rows.
            inverse_of: by dedup group, from these to tuples; None: the identity.
        """
        bags, group_of = self.unique(), self.batch.group_of
        parts = [bags[self.keys[0]].new_empty(count, 0, self._values.shape[1])]
        for group, names in groupby(features, group_of.__getitem__):
            members = torch.stack([bags[name] for name in names], 1)
            inverse = None if group is None else inverse_of[group]
            if inverse is not None:
                members = take(members.flatten(1), inverse).view(count, *members.shape[1:])
            parts.append(members)
        return torch.cat(parts, 1)
