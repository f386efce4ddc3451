"""Pooled look-ups, their backward and the row update, against FBGEMM and torch on one machine.

`python -m benchmarks.embedding [--json] [--rounds N] [--dims 16,64] [--skews heavy] [--samples N]`

Every configuration is one step of 4,096 samples: 26 features of one id each, tables of 3 to a
million rows, or one list of 35 ids in a table of a million; ids uniform, mild, or heavy (1 % of
the rows take 92 % of the look-ups). Tables lie in memory and are updated in place on all sides.
Ours and FBGEMM's CPU kernel (`SplitTableBatchedEmbeddingBags`) apply row-wise Adagrad; torch's
EmbeddingBag has sparse gradients and the cheapest rule there is, SGD, over all tables in one
matrix. Sides alternate within a round. `ratio` is the time of the faster peer over ours, the
median over rounds, of the configuration where it is smallest; `prepared` counts the transpose of
the look-ups too, which training does in the reader's thread and FBGEMM inside its backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks.embedding_step import SKEWS, Shape, Step, shapes, step_of
from schemas.config.train import SparseOptimizerConfig
from trainer.embedding.kernels.compiled import kernels_of
from trainer.embedding.kernels.interface import ArenaRows, rule_at

RULE = SparseOptimizerConfig(learning_rate=0.01)
SIDES = ("ours", "fbgemm", "torch")
DIMS = (16, 32, 64, 128)


def fbgemm(step: Step, dim: int, gradient: torch.Tensor) -> Callable[[], None]:
    """Return one step of FBGEMM's fused CPU kernel."""
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(n, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for n in step.shape.num_rows],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=RULE.learning_rate,
        eps=RULE.eps,
    )
    for weight in module.split_embedding_weights():
        weight.normal_(std=0.01)
    ids = torch.from_numpy(np.concatenate([part.ravel() for part in step.ids]))
    num_bags = step.shape.num_samples * len(step.ids)
    offsets = torch.arange(num_bags + 1) * step.shape.length

    def run() -> None:
        module(ids, offsets).backward(gradient)

    return run


def torch_bag(step: Step, dim: int, gradient: torch.Tensor) -> Callable[[], None]:
    """Return one step of torch's EmbeddingBag with sparse gradients and SGD."""
    bases = np.cumsum([0, *step.shape.num_rows])
    module = torch.nn.EmbeddingBag(int(bases[-1]), dim, mode="sum", sparse=True)
    torch.nn.init.normal_(module.weight, std=0.01)
    update = torch.optim.SGD(module.parameters(), lr=RULE.learning_rate)
    # (num_samples * num_features, length), features of a sample side by side as in the output
    ids = np.stack([part + base for part, base in zip(step.ids, bases, strict=False)], 1)
    ids = torch.from_numpy(ids.reshape(-1, step.shape.length))
    per_bag = gradient.view(-1, dim)

    def run() -> None:
        module(ids).backward(per_bag)
        update.step()
        update.zero_grad()

    return run


def ours(step: Step, dim: int, gradient: torch.Tensor) -> Callable[[], None]:
    """Return one step of our kernel on whole tables."""
    weights = {t: torch.randn(n, dim).mul_(0.01) for t, n in step.tables.items()}
    states = {t: torch.zeros(n, 1) for t, n in step.tables.items()}
    rows = {t: ArenaRows(weights[t], states[t], step.rows[t]) for t in step.tables}
    kernels = kernels_of("compiled")

    def run() -> None:
        pooling = step.pooling(kernels)
        pooling(rows).backward(gradient)
        tables = step.table_rows(rows)
        assert pooling.gradients is not None, "there was a backward"
        kernels.update(tables, pooling.gradients, rule_at(RULE, 0))

    return run


def measure(shape: Shape, skew: str, dim: int, rounds: int) -> dict[str, Any]:
    """Time all sides of one configuration.

    Args:
        shape: features, tables and bags.
        skew: one of `SKEWS`.
        dim: width of a row.
        rounds: each runs every side for `CALLS` steps.
    """
    step = step_of(shape, skew, np.random.default_rng(0))
    gradient = torch.randn(shape.num_samples, len(step.ids) * dim) * 0.01
    sides = {"ours": ours, "fbgemm": fbgemm, "torch": torch_bag}
    runs = {name: sides[name](step, dim, gradient) for name in SIDES} | {
        "transpose": step.transpose
    }
    found: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(seconds_of(run))
    times = {name: np.array(values) for name, values in found.items()}
    best = np.minimum(times["fbgemm"], times["torch"])
    ratios, prepared = best / times["ours"], best / (times["ours"] + times["transpose"])
    return {
        "shape": shape.name,
        "skew": skew,
        "dim": dim,
        "num_lookups": step.num_lookups,
        "num_distinct": step.num_distinct,
        "milliseconds": {n: round(float(np.median(v)) * 1e3, 3) for n, v in times.items()},
        "ratio": round(float(np.median(ratios)), 2),
        "ratio_prepared": round(float(np.median(prepared)), 2),
        "rounds": [round(float(r), 2) for r in ratios],
    }


CALLS = 3
"""Steps of one side in a round."""


def seconds_of(run: Callable[[], None]) -> float:
    """Return the seconds of one step."""
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    return (time.perf_counter() - start) / CALLS


def headline(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the configuration with the smallest ratio, and how many reach what."""
    worst = min(found, key=lambda c: c["ratio"])
    times = worst["milliseconds"]
    ratios = [c["ratio"] for c in found]
    return {
        "ours": times["ours"],
        "peer": min(times["fbgemm"], times["torch"]),
        "ratio": worst["ratio"],
        "unit": "ms of a step, the configuration with the smallest ratio",
        "rounds": worst["rounds"],
        "median_ratio": round(statistics.median(ratios), 2),
        "smallest_prepared": min(c["ratio_prepared"] for c in found),
        "at_least_1": sum(r >= 1 for r in ratios),
        "at_least_2": sum(r >= 2 for r in ratios),
        "num_configurations": len(found),
    }


def _row(found: dict[str, Any]) -> str:
    times = found["milliseconds"]
    numbers = "  ".join(f"{name} {times[name]:8.2f}" for name in (*SIDES, "transpose"))
    spread = f"{min(found['rounds']):.2f}..{max(found['rounds']):.2f}"
    return (
        f"{found['shape']:>5} {found['skew']:>8} {found['dim']:>4}  {numbers}  "
        f"ratio {found['ratio']:.2f} ({spread}), prepared {found['ratio_prepared']:.2f}\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embedding", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dims", default=",".join(map(str, DIMS)), help="widths, by comma")
    parser.add_argument("--skews", default=",".join(SKEWS), help="of ids, by comma")
    parser.add_argument("--shapes", default="26x1,1x35", help="features x ids, by comma")
    parser.add_argument("--samples", type=int, default=4096, help="samples of a step")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    known: dict[str, Shape] = {shape.name: shape for shape in shapes(options.samples)}
    found: list[dict[str, Any]] = []
    for name in options.shapes.split(","):
        for skew in options.skews.split(","):
            for dim in map(int, options.dims.split(",")):
                found.append(measure(known[name], skew, dim, options.rounds))
                sys.stderr.write(_row(found[-1]))
    result = headline(found) | {"details": found}
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
