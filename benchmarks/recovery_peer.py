"""TorchRec's DLRM under `torchrun`, which starts all processes again when one dies.

`torchrun --nproc-per-node N --max-restarts M -m benchmarks.recovery_peer JOB --dataset DATASET
--output RUN --every STEPS --steps STEPS [--kill-at STEP]`

Tables are sharded by rows over gloo, dense parameters are copied; all save a checkpoint together
(`torch.distributed.checkpoint`) and go on from the newest. The last one kills itself once.
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
from torch.distributed.checkpoint.state_dict_loader import load as load_together
from torch.distributed.checkpoint.state_dict_saver import save as save_together

from benchmarks.scaling_sides import Sharded, Side
from schemas.files import replace_bytes
from schemas.run_log import METRICS
from trainer.elastic.faults import FaultInjector, Faults

NEWEST = "newest"


def main(argv: Sequence[str] | None = None) -> int:
    """Train to the end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery_peer")
    parser.add_argument("job", type=Path)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kill-at", type=int, default=-1)
    told = parser.parse_args(argv)
    torch.set_num_threads(1)
    meet()
    rank, count = distributed.get_rank(), distributed.get_world_size()
    run: Path = told.output
    run.mkdir(parents=True, exist_ok=True)
    side = Side(
        rank=rank,
        count=count,
        job=told.job,
        dataset=told.dataset,
        run=run,
        meeting="",
        num_steps=told.steps,
        plan="row_wise",
    )
    sharded = Sharded(side)
    faults = Faults().kill(count - 1, told.kill_at) if told.kill_at >= 0 else Faults()
    injector = FaultInjector(faults, rank, run / "faults")
    first = load(sharded, run)
    metrics = run / METRICS
    if rank == 0:
        lines = metrics.read_bytes().splitlines(keepends=True)[:first] if first else []
        replace_bytes(metrics, b"".join(lines))
    for step in range(first, told.steps):
        injector.trigger("computed", step)
        loss = sharded.train(*sharded.read(step))
        if rank == 0:
            with metrics.open("a", encoding="utf-8") as file:
                file.write(f'{{"step": {step}, "loss": {loss!r}}}\n')
        if (step + 1) % told.every == 0:
            save(sharded, run, rank, step + 1)
    distributed.destroy_process_group()
    return 0


def meet() -> None:
    """Find the others of this start: the store of `torchrun` keeps what those before it wrote."""
    told = os.environ
    rank, count = int(told["RANK"]), int(told["WORLD_SIZE"])
    store = TCPStore(told["MASTER_ADDR"], int(told["MASTER_PORT"]), is_master=False)
    mine = PrefixStore(told["TORCHELASTIC_RESTART_COUNT"], store)
    distributed.init_process_group("gloo", store=mine, rank=rank, world_size=count)


def state_of(sharded: Sharded) -> dict[str, Any]:
    """Return what a checkpoint holds, as it is in memory."""
    return {
        "model": sharded.model.state_dict(),
        "rows": sharded.model.fused_optimizer.state_dict(),
        "dense": sharded.optimizer.state_dict(),
    }


def save(sharded: Sharded, run: Path, rank: int, step: int) -> None:
    """Save together; a checkpoint is there when all have written their part."""
    save_together(state_of(sharded), checkpoint_id=run / str(step))
    if rank == 0:
        replace_bytes(run / NEWEST, str(step).encode())


def load(sharded: Sharded, run: Path) -> int:
    """Take the newest checkpoint; return its step, 0 where there is none."""
    newest = run / NEWEST
    if not newest.is_file():
        return 0
    for parameter in sharded.dense.values():
        parameter.grad = torch.zeros_like(parameter)
    sharded.optimizer.step()  # makes the state that is loaded into
    sharded.optimizer.zero_grad()
    state = state_of(sharded)
    step = newest.read_text(encoding="utf-8")
    load_together(state, checkpoint_id=run / step)
    sharded.model.load_state_dict(state["model"])
    sharded.model.fused_optimizer.load_state_dict(state["rows"])
    sharded.optimizer.load_state_dict(state["dense"])
    return int(step)


if __name__ == "__main__":
    sys.exit(main())
