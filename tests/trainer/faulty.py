"""`python -m tests.trainer.faulty`: the trainer's command line with injected faults (`faults.py`).

Nothing in the trainer knows of faults: functions that a replica calls at the points are wrapped.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from presage.schemas.entry import process_variables
from presage.trainer.__main__ import main
from presage.trainer.data.collate import Microbatches
from presage.trainer.elastic.membership import ReplicaOptions
from presage.trainer.elastic.replica import ReplicaPeers
from presage.trainer.loop import StepTotal
from presage.trainer.run.output import RunOutput
from presage.trainer.step import MicrobatchCompute
from tests.trainer.faults import DONE, FAULTS, FaultInjector, Faults


def wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by one that gets it as its first argument."""
    wrapped = getattr(owner, name)
    setattr(owner, name, lambda *args, **more: wrapper(wrapped, *args, **more))


def install(faults: Faults) -> None:
    """Inject faults into the replica of this process."""
    injectors: list[FaultInjector] = []
    inside: set[str] = set()  # wrapped methods that are running

    def start(
        wrapped: Callable[..., None],
        peers: ReplicaPeers,
        options: ReplicaOptions,
        rows: object,
        compute: MicrobatchCompute,
        output: RunOutput,
    ) -> None:
        injectors.append(FaultInjector(faults, options.number, output.folder / DONE))
        address = injectors[-1].lighthouse_address(options.lighthouse)
        wrapped(peers, replace(options, lighthouse=address), rows, compute, output)

    def compute(wrapped: Callable[..., Any], self: object, microbatches: Microbatches) -> Any:
        train_step = microbatches.step.train_step
        injectors[-1].trigger("start", train_step)
        inside.add("compute")
        sums = wrapped(self, microbatches)
        inside.discard("compute")
        injectors[-1].trigger("computed", train_step)
        return sums

    def slow_down(
        wrapped: Callable[..., Any], worker: object, opened: Microbatches, *args: object
    ) -> Any:
        before = time.perf_counter()
        sums = wrapped(worker, opened, *args)
        if "compute" in inside:
            seconds = time.perf_counter() - before
            step, count = opened.step.train_step, len(opened.batches)
            time.sleep(max(0.0, injectors[-1].delay_sec(step, count, seconds)))
        return sums

    def add(wrapped: Callable[..., Any], peers: ReplicaPeers, *args: object) -> Any:
        total = wrapped(peers, *args)
        if isinstance(total, StepTotal):
            injectors[-1].trigger("exchanged", peers.loop.step)
        return total

    def on_commit(
        wrapped: Callable[..., None], peers: ReplicaPeers, train_step: int, committed: object
    ) -> None:
        wrapped(peers, train_step, committed)
        injectors[-1].trigger("committed", train_step)

    def load_from(wrapped: Callable[..., None], peers: ReplicaPeers, peer: object) -> None:
        inside.add("load_from")
        wrapped(peers, peer)
        inside.discard("load_from")

    def load(wrapped: Callable[..., None], peers: ReplicaPeers, arrays: object) -> None:
        wrapped(peers, arrays)
        if "load_from" in inside:
            injectors[-1].trigger("joining", peers.loop.step)

    wrap(ReplicaPeers, "__init__", start)
    wrap(MicrobatchCompute, "compute", compute)
    wrap(MicrobatchCompute, "sums_of", slow_down)
    wrap(ReplicaPeers, "add", add)
    wrap(ReplicaPeers, "on_commit", on_commit)
    wrap(ReplicaPeers, "_load_from", load_from)
    wrap(ReplicaPeers, "_load", load)


if FAULTS in os.environ:  # also in processes that are forked, not where modules are only collected
    install(Faults.from_json(os.environ[FAULTS]))

if __name__ == "__main__":
    os.environ |= process_variables()
    sys.exit(main())
