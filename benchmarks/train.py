"""Training steps of ours against TorchRec fed plain KeyedJaggedTensors.

`python -m benchmarks.train [--json] [--datasets NAME,NAME] [--models NAME,NAME]
[--top 256-64,64-32] [--rounds N] [--processor]`

Both sides train the same model on the same samples in the same batches, which are loaded into
memory before the measurement. TorchRec uses its best CPU configuration: tables in FBGEMM's fused
kernel with row-wise Adagrad, bags repeated for every sample. `unchanged` is the same model on our
reader's deduplicated batches with our embedding module; `dedup` has the same parameters and
computes what depends only on a unique tuple once per tuple. `bound` is TorchRec's time over the
time of its dense part with embeddings of no cost: the upper bound of what a faster embedding can
gain for an unchanged model. The models are `dlrm`, `dcn`, `deepfm`, `wide_deep` (built of
TorchRec's modules) and `attention` (our model on both sides, on repeated histories for the peer).
`reading` trains DLRM from Parquet: `ours` from our dataset, TorchRec from a plain file;
`of_memory` is the time of our step over that of the same step on batches in memory.
`embedding` measures lookups, their backward and the update without a model. Sides alternate, with
torch's default OMP wait policy, so the machine should be idle; otherwise `--processor` measures the
CPU time of one thread. `parity` is the largest relative difference of losses in the steps before
the measurement.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.logs import build_dataset, each_log, job_path, log_parser, write_result
from benchmarks.train_sides import (
    FreeTables,
    Step,
    Timing,
    alternate,
    fused_tables,
    milliseconds,
    our_step,
    parity,
    pass_over,
    peer_step,
    ratios,
    read_batches,
    sort_by_table,
    summarize,
)
from benchmarks.train_variants import measure_attention, measure_embedding, measure_reading
from schemas.config.train import ModelConfig, SparseOptimizerConfig, TrainConfig
from schemas.dataset.opened import Dataset, open_dataset
from trainer.components import build_model
from trainer.data.collate import Batch
from trainer.data.decode import BatchSpec, spec_of

LOGS = ("mind", "kuairand", "demo")
MODELS = ("dlrm", "dcn", "deepfm", "wide_deep", "attention", "reading", "embedding")
DIM, BATCH, THREADS = 64, 4096, 2
BOTTOM = (64,)


def config_of(dataset: Dataset, top: tuple[int, ...], name: Any = "dlrm") -> TrainConfig:
    """Return the train section of both sides."""
    return replace(
        dataset.job.train,
        model=ModelConfig(name=name, bottom_layers=BOTTOM, top_layers=top, dedup_compute=False),
        embedding_dim=DIM,
        batch_samples=BATCH,
        pooling="sum",
        sparse_optimizer=SparseOptimizerConfig(name="rowwise_adagrad"),
        dtype="float32",
        epochs=1,
    )


def torchrec_steps(
    spec: BatchSpec, config: TrainConfig, batches: Sequence[Batch]
) -> tuple[Step, Step]:
    """Return TorchRec's training step, and that of its dense part alone."""
    tables = fused_tables(spec, config)
    inputs = [replace(b, sparse=sort_by_table(b.sparse, tables.features)) for b in batches]
    free = FreeTables(tables, inputs[0].sparse)
    return _torchrec_step(tables, spec, config, inputs), _torchrec_step(free, spec, config, inputs)


def _torchrec_step(
    tables: nn.Module, spec: BatchSpec, config: TrainConfig, inputs: Sequence[Batch]
) -> Step:
    model = build_model(config, spec, tables)
    return peer_step(model, config, inputs, lambda number: model(inputs[number]))


def measure(dataset: Dataset, config: TrainConfig, timing: Timing) -> dict[str, Any]:
    """Measure all sides on one dataset."""
    spec = spec_of(dataset, config.dtype)
    ours, plain = (read_batches(dataset, config, expanded=e) for e in (False, True))
    step, timer = our_step(spec, config, ours)
    with_dedup = replace(config, model=replace(config.model, dedup_compute=True))
    dedup, dedup_timer = our_step(spec, with_dedup, ours)
    torchrec, dense = torchrec_steps(spec, config, plain)
    sides = {"torchrec": torchrec, "unchanged": step, "dedup": dedup}
    difference = parity(sides, "torchrec", len(ours))
    for each in (timer, dedup_timer):
        each.finish()
    seconds = alternate(
        {n: pass_over(s, len(ours)) for n, s in {**sides, "dense": dense}.items()}, timing
    )
    num_steps = (timing.rounds + 1) * len(ours)
    phases = {"unchanged": timer.finish()[1], "dedup": dedup_timer.finish()[1]}
    bound, unchanged = (ratios(seconds, "torchrec", side) for side in ("dense", "unchanged"))
    return {
        "num_samples": sum(b.num_samples for b in ours),
        "num_steps": len(ours),
        "parity": difference,
        "milliseconds": milliseconds(seconds),
        "bound": round(statistics.median(bound), 3),
        "phases_ms": {
            side: {n: round(s / num_steps * 1e3, 2) for n, s in by_phase.items() if s}
            for side, by_phase in phases.items()
        },
        "unchanged": summarize(unchanged),
        "dedup": summarize(ratios(seconds, "torchrec", "dedup")),
        "share_of_bound": round(statistics.median(unchanged) / statistics.median(bound), 3),
    }


def measure_model(
    name: str, dataset: Dataset, model: str, top: tuple[int, ...], timing: Timing, scratch: Path
) -> dict[str, Any]:
    """Measure one of `--models` on one log.

    Args:
        name: of the log.
        dataset: built from it.
        model: one of `--models`.
        top: widths of the top MLP.
        timing: rounds and clock.
        scratch: folder for a plain file.
    """
    config = config_of(dataset, top)
    if model == "reading":
        return measure_reading(dataset, config, timing, scratch / "plain.parquet")
    if model == "embedding":
        return measure_embedding(dataset, config, timing)
    if model == "attention":
        return measure_attention(name, dataset, config, timing)
    return measure(dataset, config_of(dataset, top, model), timing)


def headline(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Return samples per second of TorchRec and of our side closest to it."""
    times = figures["milliseconds"]
    ours = next(side for side in ("unchanged", "wide", "ours") if side in times)
    return {
        "ours": round(BATCH / times[ours] * 1e3, 1),
        "peer": round(BATCH / times["torchrec"] * 1e3, 1),
        **figures.get(ours, summarize([times["torchrec"] / times[ours]])),
        "unit": f"samples/s, {name}, {ours}, dim {DIM}, batch {BATCH}",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = log_parser("train", __doc__, LOGS)
    parser.add_argument("--top", default="256-64,64-32", help="widths of top MLPs")
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processor", action="store_true", help="CPU time of one thread")
    options = parser.parse_args(argv)
    torch.set_num_threads(1 if options.processor else THREADS)
    timing = Timing(options.rounds, time.process_time if options.processor else time.perf_counter)
    models: list[str] = options.models.split(",")
    tops = [tuple(map(int, widths.split("-"))) for widths in options.top.split(",")]
    details: dict[str, dict[str, Any]] = {}
    for name, log, scratch in each_log(options):
        dataset = open_dataset(build_dataset(job_path(name), log, scratch / "dataset"))
        for top, model in product(tops, models):
            if model == "embedding" and top != tops[0]:
                continue  # it has no MLP
            label = f"{name} {model} {'-'.join(map(str, top))}"
            details[label] = measure_model(name, dataset, model, top, timing, scratch)
            sys.stderr.write(f"{label}: {json.dumps(details[label])}\n")
    first = next(iter(details))
    result = {**headline(first, details[first]), "details": details}
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
