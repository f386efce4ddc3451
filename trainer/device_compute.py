"""Microbatches computed on a device for components in host memory.

A replica keeps its rows, its dense parameters and their optimizers in host memory, where updates
have the same bits on all replicas whatever their devices are. The device gets parameters, rows
and samples of a step and returns sums of gradients: each microbatch is computed by one replica,
and all replicas add the same sums.
"""

from __future__ import annotations

import torch

from presage.schemas.config.train import TrainConfig
from presage.trainer.components import Components, build_model, table_specs
from presage.trainer.data.collate import CollatedBatch, Microbatches, move_batch, single_microbatch
from presage.trainer.data.decode import BatchSpec
from presage.trainer.data.transfer import to_device
from presage.trainer.embedding.cache import DirectSource
from presage.trainer.embedding.device_embedding import DeviceEmbedding, DeviceLookups, upload_rows
from presage.trainer.embedding.kernels.interface import RowSums
from presage.trainer.step import (
    MicrobatchCompute,
    Node,
    PartialSums,
    PhaseTimer,
    Tree,
    add_partial_sums,
    flatten_gradients,
    sum_of_losses,
)


class DeviceMicrobatchCompute(MicrobatchCompute):
    """Computes microbatches one after the other on a device."""

    def __init__(
        self,
        components: Components,
        timer: PhaseTimer,
        spec: BatchSpec,
        config: TrainConfig,
        device: torch.device,
    ) -> None:
        super().__init__(components, timer)
        tables, source = table_specs(spec), DirectSource(components.store)
        self._config, self._device = config, device
        self._device_embedding = DeviceEmbedding(tables, config, source, device)
        self._device_model = build_model(config, spec, self._device_embedding).to(device)

    def sums_of(self, microbatches: Microbatches) -> Tree[PartialSums]:
        """Return the tree of the sums of microbatches, whose rows are open."""
        sums = Tree(microbatches.num_microbatches, add_partial_sums)
        if not microbatches.batches:
            return sums
        self._copy_parameters()
        gathered = [self._components.embedding.gathered[table] for table in microbatches.rows]
        block = upload_rows(gathered, self._device)
        for index, batch in enumerate(microbatches.batches):
            numbers = microbatches.row_numbers(index)
            moved = move_batch(batch, self._config.model, self._device, numbers)
            [lookups] = self._device_embedding.open_block(single_microbatch(moved), block)
            computed = self._compute_on_device(moved, numbers, lookups)
            sums.add(Node(0, microbatches.first + index), computed)
        return sums

    def _copy_parameters(self) -> None:
        """Copy the dense parameters to the device in one block."""
        names = dict(self._model.named_parameters())
        moved = to_device({name: p.detach() for name, p in names.items()}, self._device)
        with torch.no_grad():
            for name, parameter in self._device_model.named_parameters():
                parameter.copy_(moved[name])

    def _compute_on_device(
        self, batch: CollatedBatch, numbers: torch.Tensor, lookups: DeviceLookups
    ) -> PartialSums:
        """Return the sums of a microbatch, which come back in one block."""
        loss = sum_of_losses(self._device_model(batch), batch)
        parameters = [p for p in self._device_model.parameters() if p.requires_grad]
        inputs = [*parameters, *lookups.autograd_inputs]
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
        lookups.set_gradients(gradients[len(parameters) :])
        rows = lookups.sum_gradients()
        dense = flatten_gradients(parameters, gradients[: len(parameters)])
        scalars = torch.stack([loss.detach(), batch.weights.sum()])
        block = torch.cat([scalars, dense, rows.flatten()]).cpu()
        first_row = 2 + len(dense)
        return PartialSums(
            loss=block[0].item(),
            weight=block[1].item(),
            dense=block[2:first_row],
            rows=RowSums(numbers, block[first_row:].view(rows.shape)),
        )
