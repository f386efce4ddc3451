"""Ranks that train a model with our collections under DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from tests.presage.own_loop import TRANSFORMS, Ranker, all_rows, loader_of

BATCH_SAMPLES = 48
"""The last batch of a segment has one block: one of two ranks has no samples in it."""


def train(rank: int, world_size: int, folder: Path) -> None:
    """Train as a rank, and write losses and rows."""
    torch.set_num_threads(1)
    if world_size > 1:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder / 'ranks'}", rank=rank, world_size=world_size
        )
    ranker = Ranker(None, TRANSFORMS["split"], "rowwise_adagrad", 4)
    ranker.averaging_ranks = world_size
    model: Any = DistributedDataParallel(ranker) if world_size > 1 else ranker
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = loader_of(
        batch_samples=BATCH_SAMPLES, epochs=1, rank=rank, world_size=world_size, dtype="float32"
    )
    losses: list[float] = []
    counts: list[int] = []
    for batch in loader:
        loss = model(batch)
        losses.append(loss.item() / world_size)
        counts.append(batch.num_samples)
        dense.zero_grad()
        loss.backward()
        dense.step()
    found = {"losses": losses, "counts": counts, "rows": all_rows(ranker)}
    found["dense"] = {name: p.detach() for name, p in ranker.named_parameters()}
    torch.save(found, folder / f"{rank}.pt")
    if world_size > 1:
        distributed.destroy_process_group()
