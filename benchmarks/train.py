"""Training steps of ours against TorchRec fed plain KeyedJaggedTensors.

`python -m benchmarks.train [--json] [--datasets NAME,NAME] [--models NAME,NAME]
[--top 256-64,64-32] [--rounds N] [--processor]`

Both sides train the same model on the same samples in the same batches, which are in memory before
the clock starts. TorchRec's side is its best on CPU: tables in FBGEMM's fused kernel with row-wise
Adagrad, bags repeated for every sample. `unchanged` is the same model on our reader's deduplicated
batches and our embedding module; `dedup` computes what depends on a unique tuple alone once per
tuple, with the same parameters. `bound` is TorchRec's time over the time of its dense part alone
with embeddings that cost nothing: no embedding, however fast, gets a model that is left as it is
beyond that. Models are `dlrm`, `dcn`, `deepfm`, `wide_deep` (of TorchRec's modules; it has none of
that name) and `attention`, ours on our batches and on repeated ones. `reading` trains DLRM
from Parquet: `dedup` from our dataset, TorchRec from a plain file. `embedding` has no model:
look-ups, a given gradient back, and the update, whatever the top MLP. Sides take
turns, with torch's own setting of how threads wait, so the machine should be idle; where it is
not, `--processor` counts the processor's seconds of one thread. `parity` is the
largest relative difference of losses in the steps before the clock starts.
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

from benchmarks.logs import each_log, job_path, log_parser, write_result
from benchmarks.order import built
from benchmarks.train_attention import measure_attention
from benchmarks.train_embedding import measure_embedding
from benchmarks.train_peer import FreeTables, by_table, tables_of
from benchmarks.train_reading import measure_reading
from benchmarks.train_sides import (
    Step,
    Timing,
    batches,
    in_turns,
    milliseconds,
    ours_of,
    parity,
    pass_over,
    peer_of,
    ratios,
    shown,
)
from schemas.config.train import ModelConfig, SparseOptimizerConfig, TrainConfig
from schemas.dataset import Dataset, open_dataset
from trainer.components import build_model
from trainer.data.collate import Batch
from trainer.data.decode import BatchSpec, spec_of

LOGS = ("mind", "kuairand", "demo")
MODELS = ("dlrm", "dcn", "deepfm", "wide_deep", "attention", "reading", "embedding")
DIM, BATCH, THREADS = 64, 4096, 2
BOTTOM = (64,)


def config_of(dataset: Dataset, top: tuple[int, ...], name: Any = "dlrm") -> TrainConfig:
    """Return the train section that both sides follow."""
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


def peer(spec: BatchSpec, config: TrainConfig, given: Sequence[Batch]) -> tuple[Step, Step]:
    """Return TorchRec's steps, and those of its dense part alone."""
    tables = tables_of(spec, config)
    fed = [replace(batch, sparse=by_table(batch.sparse, tables.features)) for batch in given]
    free = FreeTables(tables, fed[0].sparse)
    return _peer_step(tables, spec, config, fed), _peer_step(free, spec, config, fed)


def _peer_step(
    tables: nn.Module, spec: BatchSpec, config: TrainConfig, fed: Sequence[Batch]
) -> Step:
    model = build_model(config, spec, tables)
    return peer_of(model, config, fed, lambda number: model(fed[number]))


def measure(dataset: Dataset, config: TrainConfig, timing: Timing) -> dict[str, Any]:
    """Time all sides in turns on one dataset.

    Args:
        dataset: with its samples.
        config: train section.
        timing: rounds and clock.
    """
    spec = spec_of(dataset, config.dtype)
    ours, plain = (batches(dataset, config, expanded=e) for e in (False, True))
    step, timer = ours_of(spec, config, ours)
    deduplicating = replace(config, model=replace(config.model, dedup_compute=True))
    dedup, dedup_timer = ours_of(spec, deduplicating, ours)
    torchrec, dense = peer(spec, config, plain)
    sides = {"torchrec": torchrec, "unchanged": step, "dedup": dedup}
    worst = parity(sides, "torchrec", len(ours))
    for each in (timer, dedup_timer):
        each.finish()
    seconds = in_turns(
        {n: pass_over(s, len(ours)) for n, s in {**sides, "dense": dense}.items()}, timing
    )
    num_steps = (timing.rounds + 1) * len(ours)
    phases = {"unchanged": timer.finish()[1], "dedup": dedup_timer.finish()[1]}
    bound, unchanged = (ratios(seconds, "torchrec", side) for side in ("dense", "unchanged"))
    return {
        "num_samples": sum(b.num_samples for b in ours),
        "num_steps": len(ours),
        "parity": worst,
        "milliseconds": milliseconds(seconds),
        "bound": round(statistics.median(bound), 3),
        "phases_ms": {
            side: {n: round(s / num_steps * 1e3, 2) for n, s in taken.items() if s}
            for side, taken in phases.items()
        },
        "unchanged": shown(unchanged),
        "dedup": shown(ratios(seconds, "torchrec", "dedup")),
        "share_of_bound": round(statistics.median(unchanged) / statistics.median(bound), 3),
    }


def measured(
    name: str, dataset: Dataset, model: str, top: tuple[int, ...], timing: Timing, scratch: Path
) -> dict[str, Any]:
    """Return what one model took on one log.

    Args:
        name: of the log.
        dataset: built of it.
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


def headline(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return samples per second of both sides, ours as little helped as was measured."""
    taken = found["milliseconds"]
    ours = next(side for side in ("unchanged", "wide", "ours") if side in taken)
    return {
        "ours": round(BATCH / taken[ours] * 1e3, 1),
        "peer": round(BATCH / taken["torchrec"] * 1e3, 1),
        **found.get(ours, shown([taken["torchrec"] / taken[ours]])),
        "unit": f"samples/s, {name}, {ours}, dim {DIM}, batch {BATCH}",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it, the headline first."""
    parser = log_parser("train", __doc__, LOGS)
    parser.add_argument("--top", default="256-64,64-32", help="widths of top MLPs")
    parser.add_argument("--models", default=",".join(MODELS), help="by comma")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processor", action="store_true", help="processor time of one thread")
    options = parser.parse_args(argv)
    torch.set_num_threads(1 if options.processor else THREADS)
    timing = Timing(options.rounds, time.process_time if options.processor else time.perf_counter)
    models: list[str] = options.models.split(",")
    tops = [tuple(map(int, widths.split("-"))) for widths in options.top.split(",")]
    found: dict[str, dict[str, Any]] = {}
    for name, log, scratch in each_log(options):
        dataset = open_dataset(built(job_path(name), log, scratch / "dataset"))
        for top, model in product(tops, models):
            if model == "embedding" and top != tops[0]:
                continue  # it has no MLP
            label = f"{name} {model} {'-'.join(map(str, top))}"
            found[label] = measured(name, dataset, model, top, timing, scratch)
            sys.stderr.write(f"{label}: {json.dumps(found[label])}\n")
    first = next(iter(found))
    result = {**headline(first, found[first]), "details": found}
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
