"""Training steps of ours against TorchRec fed plain KeyedJaggedTensors.

Both sides train the same model on the same samples in the same batches, which are loaded into
memory before the measurement. TorchRec uses its best CPU configuration: tables in FBGEMM's fused
kernel with row-wise Adagrad, bags repeated for every sample. `unchanged` is the same model on our
reader's deduplicated batches with our embedding module; `dedup` has the same parameters and
computes what depends only on a unique tuple once per tuple. `bound` is TorchRec's time over the
time of its dense part with embeddings of no cost: the upper bound of what a faster embedding can
gain for an unchanged model. The models are `dlrm`, `dcn`, `deepfm`, `wide_deep` (built of
TorchRec's modules) and `attention` (our model on both sides, on repeated histories for the peer).

`reading` trains DLRM from Parquet: ours from our dataset, TorchRec from one plain file of the same
samples, as `presage expand --model-inputs` writes it. Both hash ids, and read ahead in one thread.
`of_memory` is the time of our step over that of the same step on batches in memory.

Sides alternate, with torch's default OMP wait policy, so the machine should be idle; otherwise
`--processor` measures the CPU time of one thread. `parity` is the largest relative difference of
losses in the steps before the measurement.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torchrec.models.dlrm import DLRM

from benchmarks.common.harness import (
    Options,
    alternate,
    compared,
    headline,
    median,
    ratios,
    report,
    timed,
)
from benchmarks.common.logs import build_dataset, each_log, job_path
from benchmarks.common.training import reader_of
from benchmarks.peers.fbgemm import FreeTables, FusedSequences, fused_tables, sort_by_table
from benchmarks.peers.loading import peer_batches, plain_path
from presage.pipelines.table.expand import expand
from presage.schemas.config.train import ModelConfig, SparseOptimizerConfig, TrainConfig
from presage.schemas.dataset.opened import OpenDataset, open_dataset
from presage.trainer.components import build_components, build_model, dense_optimizer, order_of
from presage.trainer.data.collate import CollatedBatch
from presage.trainer.data.decode import BatchSpec, spec_of
from presage.trainer.data.reader import prefetch
from presage.trainer.models import attention
from presage.trainer.models.torchrec_models import dense_inputs
from presage.trainer.step import PhaseTimer, loss_of, train_batch

LOGS = ("mind", "kuairand", "demo")
MODELS = ("dlrm", "dcn", "deepfm", "wide_deep", "attention", "reading")
DIM, BATCH, THREADS = 64, 4096, 2
BOTTOM = (64,)
STEPS, PARITY_STEPS = 12, 3
ATTENTION_STEPS = 4
"""Per round: a step of the expanded side takes seconds."""
HISTORY_AND_TARGET = {
    "mind": ("history", "item"),
    "kuairand": ("watch_seq", "video_id"),
    "demo": ("clicked_items", "item_id"),
    "demo_small": ("clicked_items", "item_id"),
}
"""History of each log, and the feature that queries it."""
PREFETCH_STEPS, READ_STEPS = 2, 40

Step = Callable[[int], float]
"""Trains the batch with the given index and returns its loss."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Number of rounds, after one warm-up round, and the clock."""

    rounds: int
    clock: Callable[[], float] = time.perf_counter

    def seconds(self, passes: Mapping[str, Callable[[], object]], num_steps: int) -> Times:
        """Return the seconds of a step of each side in each round.

        Args:
            passes: each trains `num_steps`.
            num_steps: of a pass.
        """

        def measured(run: Callable[[], object]) -> float:
            return timed(run, self.clock) / num_steps

        sides = {name: partial(measured, run) for name, run in passes.items()}
        return alternate(sides, self.rounds, warm_up=1)


Times = dict[str, list[float]]
"""Side -> seconds of a step in each round."""


def config_of(dataset: OpenDataset, top: tuple[int, ...], name: Any = "dlrm") -> TrainConfig:
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


def read_batches(
    dataset: OpenDataset, config: TrainConfig, *, expanded: bool, count: int = STEPS
) -> list[CollatedBatch]:
    """Return the first full batches of a run, at most `count`."""
    order = order_of(replace(dataset.job, train=config), dataset)
    reader = reader_of(dataset, config, expanded=expanded)
    read = [reader.read(step) for step in range(min(count, order.num_steps))]
    return [batch for batch in read if batch.num_samples == read[0].num_samples]


def our_step(
    spec: BatchSpec, config: TrainConfig, batches: Sequence[CollatedBatch]
) -> tuple[Step, PhaseTimer]:
    """Return our training step over some batches, and the timer of its phases."""
    components = build_components(spec, config)
    timer = PhaseTimer(time.perf_counter)

    def step(number: int) -> float:
        return train_batch(components, batches[number], timer)

    return step, timer


def peer_step(
    model: nn.Module,
    config: TrainConfig,
    batches: Sequence[CollatedBatch],
    forward: Callable[[int], Any],
) -> Step:
    """Return the training step of a model whose tables are updated in the backward pass.

    Args:
        model: its dense parameters are trained by `config.dense_optimizer`.
        config: train section.
        batches: labels and weights.
        forward: maps the index of a batch to logits.
    """
    optimizer = dense_optimizer(config.dense_optimizer, list(model.parameters()))

    def step(number: int) -> float:
        loss = loss_of(forward(number), batches[number])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def parity(sides: Mapping[str, Step], reference: str, count: int) -> float:
    """Return the largest relative difference of losses over the first steps."""
    worst = 0.0
    for number in range(min(PARITY_STEPS, count)):
        losses = {name: step(number) for name, step in sides.items()}
        worst = max(worst, *(abs(x / losses[reference] - 1) for x in losses.values()))
    return worst


def pass_over(step: Step, count: int) -> Callable[[], object]:
    """Return a pass of a step over `count` batches."""
    return lambda: [step(number) for number in range(count)]


def result_of(times: Times, ours: str, **more: Any) -> dict[str, Any]:
    """Compare one of our sides with TorchRec, in samples per second."""
    rates = {side: [BATCH / sec for sec in times[side]] for side in (ours, "torchrec")}
    unit = f"samples/s of {ours}, dim {DIM}, batch {BATCH}"
    milliseconds = {side: round(median(of) * 1e3, 2) for side, of in times.items()}
    more["milliseconds"] = milliseconds
    return compared(rates[ours], rates["torchrec"], unit, higher=True, **more)


def phases_ms(timer: PhaseTimer, num_steps: int) -> dict[str, float]:
    """Return the milliseconds of a step in each phase, since the last call."""
    return {n: round(s / num_steps * 1e3, 2) for n, s in timer.finish()[1].items() if s}


def torchrec_steps(
    spec: BatchSpec, config: TrainConfig, batches: Sequence[CollatedBatch]
) -> tuple[Step, Step]:
    """Return TorchRec's training step, and that of its dense part alone."""
    tables = fused_tables(spec, config)
    inputs = [replace(b, sparse=sort_by_table(b.sparse, tables.features)) for b in batches]
    free = FreeTables(tables, inputs[0].sparse)
    return _torchrec_step(tables, spec, config, inputs), _torchrec_step(free, spec, config, inputs)


def _torchrec_step(
    tables: nn.Module, spec: BatchSpec, config: TrainConfig, inputs: Sequence[CollatedBatch]
) -> Step:
    model = build_model(config, spec, tables)
    return peer_step(model, config, inputs, lambda number: model(inputs[number]))


def measure_pooled(dataset: OpenDataset, config: TrainConfig, timing: Timing) -> dict[str, Any]:
    """Measure all sides of a pooled model on one dataset."""
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
    sides["dense"] = dense
    times = timing.seconds({n: pass_over(s, len(ours)) for n, s in sides.items()}, len(ours))
    num_steps = (timing.rounds + 1) * len(ours)
    return result_of(
        times,
        "unchanged",
        bound=median(ratios(times["dense"], times["torchrec"])),
        dedup=ratios(times["dedup"], times["torchrec"]),
        num_samples=sum(b.num_samples for b in ours),
        num_steps=len(ours),
        parity=difference,
        phases_ms={
            "unchanged": phases_ms(timer, num_steps),
            "dedup": phases_ms(dedup_timer, num_steps),
        },
    )


def measure_attention(
    name: str, dataset: OpenDataset, config: TrainConfig, timing: Timing
) -> dict[str, Any]:
    """Measure attention on one dataset.

    Args:
        name: of its log.
        dataset: with its samples.
        config: train section of the DLRM's benchmark; the model is replaced.
        timing: rounds and clock.
    """
    history, target = HISTORY_AND_TARGET[name]
    model = ModelConfig(
        name="attention",
        history=history,
        target=target,
        bottom_layers=config.model.bottom_layers,
        top_layers=config.model.top_layers,
    )
    config = replace(config, model=model)
    spec = spec_of(dataset, config.dtype)
    ours, plain = (
        read_batches(dataset, config, expanded=e, count=ATTENTION_STEPS) for e in (False, True)
    )
    step, timer = our_step(spec, config, ours)
    tables = FusedSequences(spec, config)
    expanded = attention.build(config, spec.sparse, len(spec.dense), tables)
    inputs = [replace(batch, sparse=cast(Any, tables.split(batch.sparse))) for batch in plain]
    peer = peer_step(expanded, config, plain, lambda number: expanded(inputs[number]))
    sides = {"torchrec": peer, "ours": step}
    difference = parity(sides, "torchrec", len(ours))
    timer.finish()
    times = timing.seconds({n: pass_over(s, len(ours)) for n, s in sides.items()}, len(ours))
    group = ours[0].group_of[history]
    return result_of(
        times,
        "ours",
        num_steps=len(ours),
        parity=difference,
        phases_ms=phases_ms(timer, (timing.rounds + 1) * len(ours)),
        unique_histories=ours[0].num_samples
        if group is None
        else len(ours[0].groups[group].offsets) - 1,
    )


def measure_reading(dataset: OpenDataset, config: TrainConfig, timing: Timing) -> dict[str, Any]:
    """Measure training from Parquet, and from our batches in memory.

    Args:
        dataset: with its samples; the plain file is written beside it.
        config: train section of the DLRM's benchmark.
        timing: rounds and clock.
    """
    config = replace(config, model=replace(config.model, dedup_compute=True))
    spec, place = spec_of(dataset, config.dtype), Path(str(dataset.directory))
    expand(place, plain_path(place), model_inputs=True)
    tables = fused_tables(spec, config)
    torchrec = dlrm_of(tables, spec, config)
    optimizer = dense_optimizer(config.dense_optimizer, list(torchrec.parameters()))
    collated = read_batches(dataset, config, expanded=False, count=READ_STEPS)
    num_steps = len(collated)
    components = build_components(spec, config)
    timer = PhaseTimer(time.perf_counter)

    def peer_pass() -> None:
        for batch in islice(peer_batches(place, "iter_batches"), num_steps):
            sparse = sort_by_table(batch.sparse, tables.features)
            logits = torchrec(dense_inputs(batch.dense), sparse).squeeze(1)
            loss = loss_of(logits, cast(CollatedBatch, batch))  # reads labels and weights only
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()

    def our_pass() -> None:
        reader = reader_of(dataset, config, expanded=False)  # a new one, without cached row groups
        for batch in prefetch(reader.read, range(num_steps), PREFETCH_STEPS):
            train_batch(components, batch, timer)

    def memory_pass() -> None:
        for batch in collated:
            train_batch(components, batch, timer)

    passes = {"torchrec": peer_pass, "ours": our_pass, "memory": memory_pass}
    times = timing.seconds(passes, num_steps)
    return result_of(
        times,
        "ours",
        num_steps=num_steps,
        plain_bytes=plain_path(place).stat().st_size,
        of_memory=ratios(times["memory"], times["ours"]),
    )


def dlrm_of(tables: nn.Module, spec: BatchSpec, config: TrainConfig) -> DLRM:
    """Return TorchRec's DLRM over some tables, with the same initial parameters as ours."""
    num_dense = max(1, len(spec.dense))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        return DLRM(
            tables,  # type: ignore[arg-type] # has the two members that DLRM uses
            num_dense,
            [*config.model.bottom_layers, config.embedding_dim],
            [*config.model.top_layers, 1],
        )


def measure_model(
    name: str, dataset: OpenDataset, model: str, top: tuple[int, ...], timing: Timing
) -> dict[str, Any]:
    """Measure one of `--models` on one log.

    Args:
        name: of the log.
        dataset: built from it.
        model: one of `--models`.
        top: widths of the top MLP.
        timing: rounds and clock.
    """
    config = config_of(dataset, top)
    if model == "reading":
        return measure_reading(dataset, config, timing)
    if model == "attention":
        return measure_attention(name, dataset, config, timing)
    return measure_pooled(dataset, config_of(dataset, top, model), timing)


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure all models on all logs; the result is the first one."""
    torch.set_num_threads(1 if options.processor else THREADS)
    timing = Timing(options.rounds, time.process_time if options.processor else time.perf_counter)
    details: dict[str, Any] = {}
    for name, log, folder in each_log(options, scratch):
        dataset = open_dataset(build_dataset(job_path(name), log, folder / "dataset"))
        for widths, model in product(options.top, options.models):
            top = tuple(map(int, widths.split("-")))
            label = f"{name} {model} {widths}"
            details[label] = measure_model(name, dataset, model, top, timing)
            report(label, details[label])
    return headline(details)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("train", __doc__, rounds=5)
    options.add_logs(LOGS)
    options.add("--top", ("256-64", "64-32"), "widths of top MLPs", small=("64-32",))
    options.add("--models", MODELS, "models", small=("dlrm",), choices=MODELS)
    options.add("--processor", False, "CPU time of one thread")
    return options.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
