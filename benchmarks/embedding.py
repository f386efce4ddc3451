"""Pooled lookups, their backward and the row update, against FBGEMM and torch.

Every configuration is one step of 4,096 samples: 26 features of one id each in tables of 3 to a
million rows, or one list of 35 ids in a table of a million rows; ids are uniform, mildly or heavily
skewed (1 % of the rows get 92 % of the lookups). All sides keep tables in memory and update them in
place. Ours and FBGEMM's CPU kernel (`SplitTableBatchedEmbeddingBags`) apply row-wise Adagrad;
torch's EmbeddingBag has sparse gradients and SGD, the cheapest optimizer, with all tables in one
matrix. Sides alternate within a round. `ratio` is the time of the faster peer over ours, the median
over rounds, of the configuration with the smallest ratio; `prepared` also counts the transpose of
the lookups, which our reader computes in its thread and FBGEMM in its backward.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

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
from benchmarks.common.skew import skewed_rows
from presage.schemas.arrays import offsets_of
from presage.schemas.config.train import SparseOptimizerConfig
from presage.schemas.dataset import order
from presage.trainer.data.collate import CollatedBatch
from presage.trainer.data.lookup import KeyedBags, TableLookup, table_lookups, vector_layout
from presage.trainer.embedding.kernels import compiled
from presage.trainer.embedding.kernels.interface import ArenaRows, TableRows, rule_at
from presage.trainer.embedding.pooling import Pooling

SKEWS = ("uniform", "mild", "heavy")


@dataclass(frozen=True, slots=True)
class Shape:
    """Lookups of a step.

    Attributes:
        name: features x ids of a bag.
        num_samples: of a step.
        num_rows: of each feature's table.
        length: ids of a bag.
    """

    name: str
    num_samples: int
    num_rows: tuple[int, ...]
    length: int


def shapes(num_samples: int) -> tuple[Shape, Shape]:
    """Return the two shapes of the benchmark."""
    sizes = np.geomspace(3, 1_000_000, 26).round().astype(int)
    return (
        Shape("26x1", num_samples, tuple(sizes.tolist()), 1),
        Shape("1x35", num_samples, (1_000_000,), 35),
    )


@dataclass(frozen=True, slots=True)
class Step:
    """The ids of one step and their lookups in whole tables.

    Attributes:
        shape: lookups of the step.
        ids: (num_samples, length) of each feature.
        batch: the lookups; their positions are rows of whole tables.
        rows: distinct rows of each table.
    """

    shape: Shape
    ids: tuple[NDArray[np.int64], ...]
    batch: CollatedBatch
    rows: Mapping[str, torch.Tensor]

    @property
    def tables(self) -> dict[str, int]:
        """Return the number of rows of each table."""
        return dict(zip(self.batch.lookups, self.shape.num_rows, strict=True))

    @property
    def num_lookups(self) -> int:
        """Return the number of lookups of the step."""
        return sum(part.size for part in self.ids)

    @property
    def num_distinct(self) -> int:
        """Return the number of distinct rows of the step."""
        return sum(len(part) for part in self.rows.values())

    def transpose(self) -> None:
        """Compute the lookups and their transpose, as the reader's thread does for each batch."""
        _lookups(self.ids, self.batch)

    def table_rows(self, rows: Mapping[str, ArenaRows]) -> list[TableRows]:
        """Return the rows to update, in place in whole tables."""
        return [
            TableRows(
                block=rows[table].block,
                positions=rows[table].positions,
                readers=lookup.readers,
                reader_offsets=lookup.reader_offsets,
            )
            for table, lookup in self.batch.lookups.items()
        ]


def step_of(shape: Shape, skew: str, rng: np.random.Generator) -> Step:
    """Draw the ids of a step with one of `SKEWS`."""
    count = shape.num_samples * shape.length
    ids = tuple(
        draw(num_rows, count, skew, rng).reshape(shape.num_samples, shape.length)
        for num_rows in shape.num_rows
    )
    names = [f"f{i:02d}" for i in range(len(ids))]
    batch = CollatedBatch(
        step=order.Step(0, 0, 0, np.arange(1)),
        num_samples=shape.num_samples,
        labels=torch.zeros(shape.num_samples),
        weights=torch.ones(shape.num_samples),
        dense=torch.zeros(shape.num_samples, 0),
        sparse=KeyedJaggedTensor.empty(),
        lookups={},
        groups={},
        group_of=dict.fromkeys(names),
    )
    lookups = _lookups(ids, batch)
    rows = {table: torch.from_numpy(lookup.rows).int() for table, lookup in lookups.items()}
    return Step(shape, ids, replace(batch, lookups=lookups), rows)


def _lookups(ids: tuple[NDArray[np.int64], ...], batch: CollatedBatch) -> dict[str, TableLookup]:
    names = list(batch.group_of)
    lengths = np.concatenate([np.full(len(part), part.shape[1], np.int64) for part in ids])
    bags = KeyedBags(
        num_bags={name: len(part) for name, part in zip(names, ids, strict=True)},
        values=np.concatenate([part.ravel() for part in ids]),
        lengths=lengths,
        offsets=offsets_of(lengths),
    )
    layout = vector_layout(batch.group_of, {}, batch.num_samples)
    return table_lookups({name: (name,) for name in names}, bags, layout)


def draw(num_rows: int, count: int, skew: str, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw ids with one of `SKEWS`; hot rows are spread over the table."""
    if skew == "uniform" or num_rows < 10:
        return rng.integers(0, num_rows, count)
    if skew == "heavy":
        return skewed_rows(num_rows, count, int(rng.integers(1 << 30))).astype(np.int64)
    ranks = (num_rows * rng.random(count) ** 1.5).astype(np.int64)
    return rng.permutation(num_rows)[np.minimum(ranks, num_rows - 1)]


RULE = SparseOptimizerConfig(learning_rate=0.01)
CALLS = 3
"""Steps of one side in a round."""


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
    """Return one step of our kernel over whole tables."""
    blocks = {t: torch.randn(n, dim + 1).mul_(0.01) for t, n in step.tables.items()}
    for block in blocks.values():
        block[:, dim] = 0.0  # the state of row-wise Adagrad
    rows = {t: ArenaRows(blocks[t], dim, step.rows[t]) for t in step.tables}

    def run() -> None:
        pooling = Pooling(step.batch, rows, mean=False)
        pooling.pool().backward(gradient)
        tables = step.table_rows(rows)
        assert pooling.gradients is not None, "set by the backward pass"
        compiled.update(tables, pooling.gradients, rule_at(RULE, 0))

    return run


def measure_shape(shape: Shape, skew: str, dim: int, rounds: int) -> dict[str, Any]:
    """Measure all sides of one configuration.

    Args:
        shape: features, tables and bags.
        skew: one of `SKEWS`.
        dim: width of a row.
        rounds: each runs `CALLS` steps of every side.
    """
    step = step_of(shape, skew, np.random.default_rng(0))
    gradient = torch.randn(shape.num_samples, len(step.ids) * dim) * 0.01
    sides = {"ours": ours, "fbgemm": fbgemm, "torch": torch_bag}
    runs = {name: sides[name](step, dim, gradient) for name in sides}
    runs["transpose"] = step.transpose
    seconds = alternate(
        {name: partial(seconds_per_step, run) for name, run in runs.items()}, rounds, warm_up=1
    )
    times = {name: np.array(values) * 1e3 for name, values in seconds.items()}
    best = np.minimum(times["fbgemm"], times["torch"]).tolist()
    prepared = (times["ours"] + times["transpose"]).tolist()
    return compared(
        times["ours"].tolist(),
        best,
        "ms of a step",
        num_lookups=step.num_lookups,
        num_distinct=step.num_distinct,
        milliseconds={n: round(float(np.median(v)), 3) for n, v in times.items()},
        ratio_prepared=median(ratios(prepared, best)),
    )


def seconds_per_step(run: Callable[[], None]) -> float:
    """Return the seconds of one step."""
    return timed(lambda: [run() for _ in range(CALLS)]) / CALLS


def measure(options: argparse.Namespace, _: Path) -> dict[str, Any]:
    """Measure all configurations; the result is the one with the smallest ratio."""
    torch.set_num_threads(options.threads)
    by_name: dict[str, Shape] = {shape.name: shape for shape in shapes(options.samples)}
    details: dict[str, Any] = {}
    for name, skew, dim in product(options.shapes, options.skews, options.dims):
        label = f"{name} {skew} {dim}"
        details[label] = measure_shape(by_name[name], skew, dim, options.rounds)
        report(label, details[label])
    found = [one["ratio"] for one in details.values()]
    return {
        **headline(details, min(details, key=lambda label: details[label]["ratio"])),
        "median_ratio": median(found),
        "smallest_prepared": min(one["ratio_prepared"] for one in details.values()),
        "at_least_1": sum(ratio >= 1 for ratio in found),
        "at_least_2": sum(ratio >= 2 for ratio in found),
        "num_configurations": len(details),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("embedding", __doc__, rounds=7)
    options.add("--dims", (16, 32, 64, 128), "widths", small=(16,))
    options.add("--skews", SKEWS, "of ids", small=("heavy",), choices=SKEWS)
    options.add("--shapes", ("26x1", "1x35"), "features x ids")
    options.add("--samples", 4096, "samples of a step", small=64)
    options.add("--threads", 2, "of torch")
    return options.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
