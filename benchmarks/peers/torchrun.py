"""TorchRec's DLRM under `torchrun`, which restarts all processes when one dies.

`torchrun --nproc-per-node N --max-restarts M -m benchmarks.peers.torchrun JOB --dataset DATASET
--output RUN --every STEPS --steps STEPS [--kill-at STEP]`

Tables are sharded by rows over gloo, dense parameters are replicated. All ranks save a checkpoint
together (`torch.distributed.checkpoint`) and resume from the newest. The last rank kills itself
once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from benchmarks.peers.torchrec_ranks import ProcessConfig, ShardedTrainer
from presage.schemas.dataset.files import replace_bytes
from presage.schemas.run.records import METRICS
from tests.trainer.faults import FaultInjector, Faults

NEWEST = "newest"


def main(argv: Sequence[str] | None = None) -> int:
    """Train one rank to the end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.torchrun")
    parser.add_argument("job", type=Path)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kill-at", type=int, default=-1)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    init_process_group()
    rank, count = distributed.get_rank(), distributed.get_world_size()
    run: Path = options.output
    run.mkdir(parents=True, exist_ok=True)
    config = ProcessConfig(
        rank=rank,
        count=count,
        job=options.job,
        dataset=options.dataset,
        run=run,
        address="",
        num_steps=options.steps,
        plan="row_wise",
    )
    trainer = ShardedTrainer(config)
    kill = options.kill_at >= 0
    faults = Faults().kill(count - 1, options.kill_at) if kill else Faults()
    injector = FaultInjector(faults, rank, run / "faults")
    first = load_checkpoint(trainer, run)
    metrics = run / METRICS
    if rank == 0:
        lines = metrics.read_bytes().splitlines(keepends=True)[:first] if first else []
        replace_bytes(metrics, b"".join(lines))
    for step in range(first, options.steps):
        injector.trigger("computed", step)
        loss = trainer.train(*trainer.read(step))
        if rank == 0:
            with metrics.open("a", encoding="utf-8") as file:
                file.write(f'{{"step": {step}, "loss": {loss!r}}}\n')
        if (step + 1) % options.every == 0:
            save_checkpoint(trainer, run, rank, step + 1)
    distributed.destroy_process_group()
    return 0


def init_process_group() -> None:
    """Join the process group of this restart.

    `torchrun`'s store keeps the keys of earlier restarts, so the restart count is a key prefix.
    """
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    prefixed = PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    distributed.init_process_group("gloo", store=prefixed, rank=rank, world_size=count)


def state_of(trainer: ShardedTrainer) -> dict[str, Any]:
    """Return the state dictionaries of a checkpoint."""
    return {
        "model": trainer.model.state_dict(),
        "rows": trainer.model.fused_optimizer.state_dict(),
        "dense": trainer.optimizer.state_dict(),
    }


def save_checkpoint(trainer: ShardedTrainer, run: Path, rank: int, step: int) -> None:
    """Save a checkpoint with all ranks."""
    save_state_dict(state_of(trainer), checkpoint_id=run / str(step))
    if rank == 0:
        replace_bytes(run / NEWEST, str(step).encode())


def load_checkpoint(trainer: ShardedTrainer, run: Path) -> int:
    """Load the newest checkpoint; return its step, 0 if there is none."""
    newest = run / NEWEST
    if not newest.is_file():
        return 0
    for parameter in trainer.dense.values():
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()  # allocates the optimizer state
    trainer.optimizer.zero_grad()
    state = state_of(trainer)
    step = newest.read_text(encoding="utf-8")
    load_state_dict(state, checkpoint_id=run / step)
    trainer.model.load_state_dict(state["model"])
    trainer.model.fused_optimizer.load_state_dict(state["rows"])
    trainer.optimizer.load_state_dict(state["dense"])
    return int(step)


if __name__ == "__main__":
    sys.exit(main())
