"""Causal attention over a history for all samples that share it, against one sample at a time.

Users with `--lengths` events and `--targets` samples each, one event apart. `shared`: events once
for all samples of a user. `alone`: a copy of the events for each sample, in batches of as many
samples. Forward and backward of the layers in float32, one thread; rows of events are drawn.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.harness import Options, alternate, compared, report
from presage.trainer.data.history_batch import HistoryBatch
from presage.trainer.models.hstu import HstuLayer, lay_out_runs

DIM, HEADS, SAMPLES = 64, 2, 64


def measure(options: argparse.Namespace, _: Path) -> dict[str, Any]:
    """Compare the samples a second for each length and number of targets."""
    torch.set_num_threads(1)
    comparisons: dict[str, Any] = {}
    for length in options.lengths:
        layers = [HstuLayer(DIM, HEADS, length) for _ in range(options.layers)]
        for targets in options.targets:
            shared, alone = (
                batch_of(length, targets, is_shared=is_shared) for is_shared in (True, False)
            )
            sides = {
                "shared": lambda b=shared, n=length, of=layers: samples_per_sec(b, of, n),
                "alone": lambda b=alone, n=length, of=layers: samples_per_sec(b, of, n),
            }
            rates = alternate(sides, options.rounds)
            name = f"{targets} samples of {length} events"
            text = "samples a second, events once for all samples, against once for each"
            comparisons[name] = compared(rates["shared"], rates["alone"], text, higher=True)
            report(name, comparisons[name])
    return comparisons


def batch_of(length: int, targets: int, *, is_shared: bool) -> tuple[HistoryBatch, torch.Tensor]:
    """Return the events of a batch, and the run of each sample.

    Sample k of a user sees all but the last `targets - k - 1` events.
    """
    num_samples = max(SAMPLES, targets)
    of_user = torch.arange(num_samples) % targets
    seen = length - targets + 1 + of_user
    if is_shared:
        run_of = torch.arange(num_samples) // targets
        runs = torch.arange(num_samples // targets + 1) * length
    else:
        run_of, runs = torch.arange(num_samples), torch.nn.functional.pad(seen.cumsum(0), (1, 0))
    starts = runs[run_of]
    ticks = torch.randint(0, 50, (int(runs[-1]),), generator=torch.Generator().manual_seed(0))
    ticks = ticks.cumsum(0)
    ends = starts + seen
    history = HistoryBatch(
        values={}, ticks=ticks, starts=starts, ends=ends, times=ticks[ends - 1] + 1, runs=runs
    )
    return history, run_of


def samples_per_sec(
    batch: tuple[HistoryBatch, torch.Tensor], layers: Sequence[HstuLayer], length: int
) -> float:
    """Return the samples a second of forward and backward, with the layout of the batch."""
    history, run_of = batch
    events = torch.randn(len(history.ticks), DIM, requires_grad=True)
    targets = torch.randn(len(run_of), DIM, requires_grad=True)
    start = time.process_time()
    layout = lay_out_runs(history, run_of, length, events.dtype)
    x, y = events, targets
    for number, layer in enumerate(layers, 1):
        x, y = layer(x, y, layout, is_last=number == len(layers))
    y.sum().backward()
    return len(run_of) / (time.process_time() - start)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = Options("hstu", __doc__, rounds=5)
    options.add_parts({"model": measure})
    options.add("--lengths", (128, 512), "events of a user", small=(16,))
    options.add("--targets", (8, 32), "samples of a user", small=(4,))
    options.add("--layers", 2, "of the model")
    return options.run_parts(argv)


if __name__ == "__main__":
    sys.exit(main())
