"""Training on a dataset of two segments, the second of which was appended."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from presage.pipelines.build import build
from presage.schemas.config.job import load_job
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.run.records import METRICS, read_metrics
from presage.schemas.storage.location import Location
from presage.trainer.components import order_of
from presage.trainer.data.decode import spec_of
from presage.trainer.evaluation.evaluate import evaluate_run
from presage.trainer.run.folder import verify_run
from tests.pipelines.appending import DEFAULT, EXTRA, addition, changed
from tests.pipelines.logs import SCHEMA, raw_rows, request, samples_of, write_log
from tests.trainer.runs import assert_equal, reader_of, run_job

EVALUATION_FROM = datetime(2026, 1, 1, 0, 8)
ROWS = (300, 200)
"""Rows of the log of each segment; its number is the seed."""
TRAIN = (
    "batch_samples: 32, epochs: 2, embedding_dim: 8, model: {bottom_layers: [16], top_layers: [16]}"
)
TWICE = (
    ("oracle: {batch_samples: 32}", "oracle: {batch_samples: 32, epochs: 2}"),
    ("train: {batch_samples: 32}", f"train: {{{TRAIN}}}"),
)
SQL = "clicked AS label"
TABLES = ("    users:", "    kinds: {features: [kind], num_rows: 8}\n    users:")
ADDED = EXTRA + EXTRA.replace('"price" type: FLOAT', '"kind" type: INT').replace("dense", "sparse")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The log of each segment."""
    directory = tmp_path_factory.mktemp("logs")
    for seed, num_rows in enumerate(ROWS):
        write_log(directory / str(seed), num_rows, seed)
    return [directory / str(seed) for seed in range(len(ROWS))]


def built_and_appended(dataset: Path, jobs: Sequence[Path], logs: Sequence[Path]) -> Path:
    """Build a dataset of the first log and append the second, each by its own job."""
    build(request(jobs[0], logs[0], dataset))
    build(addition(jobs[1], logs[1], dataset))
    return dataset


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of two epochs."""
    return changed(tmp_path_factory.mktemp("job"), *TWICE)


@pytest.fixture(scope="module")
def dataset(job: Path, logs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two segments, which no test changes."""
    return built_and_appended(tmp_path_factory.mktemp("two") / "dataset", [job, job], logs)


@pytest.fixture(scope="module")
def plain(job: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished plain run."""
    run = tmp_path_factory.mktemp("runs") / "plain"
    run_job(job, dataset, run)
    return run


def samples_by_split(seed: int) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    """Return a log's training and evaluation samples, from the raw rows alone."""
    samples = samples_of(raw_rows(ROWS[seed], seed))
    late = [s[1] >= EVALUATION_FROM for s in samples]  # type: ignore[operator]
    return (
        [s for s, is_late in zip(samples, late, strict=True) if not is_late],
        [s for s, is_late in zip(samples, late, strict=True) if is_late],
    )


@pytest.mark.slow
def test_plain_training_uses_every_sample_of_both_segments_in_every_epoch(
    job: Path, dataset: Path, plain: Path
) -> None:
    num_train = [len(samples_by_split(seed)[0]) for seed in range(2)]
    assert min(num_train) > 100
    metrics = read_metrics(plain / METRICS)
    opened = open_dataset(dataset)
    order = order_of(load_job(job), opened)
    num_samples = np.zeros((2, 2), np.int64)  # epoch, segment
    for metric in metrics:
        step = order.step(metric.step)
        num_samples[step.epoch, step.segment] += metric.num_samples
    assert num_samples.tolist() == [num_train, num_train]
    assert verify_run(plain).problems == ()


@pytest.mark.slow
def test_cached_run_stopped_in_the_second_segment_and_resumed_has_the_bits_of_a_plain_one(
    job: Path, dataset: Path, plain: Path, tmp_path: Path
) -> None:
    order = order_of(load_job(job), open_dataset(dataset))
    steps = [order.step(s) for s in range(order.num_steps)]
    second = [s.train_step for s in steps if (s.epoch, s.segment) == (0, 1)]
    run, stop = tmp_path / "run", second[len(second) // 2]
    run_job(job, dataset, run, embedding="cached", steps=stop)
    summary = run_job(job, dataset, run, embedding="cached", resume=True)
    assert_equal(run, plain)
    assert summary.cache_hit_rate is not None
    assert 0 < summary.cache_hit_rate < 1


def test_evaluation_covers_the_evaluation_ranges_of_both_segments(
    job: Path, dataset: Path, plain: Path
) -> None:
    samples = [samples_by_split(seed)[1] for seed in range(2)]
    batches = [*reader_of(job, dataset).evaluation_batches()]
    for segment, expected in enumerate(samples):
        mine = [b for b in batches if b.step.segment == segment]
        keys = np.concatenate([b.kept["session"] for b in mine])
        labels = np.concatenate([b.labels.numpy() for b in mine])
        pairs = sorted(zip(keys.tolist(), labels.tolist(), strict=True))
        assert pairs == sorted((s[0], s[-1]) for s in expected)
    evaluation = evaluate_run(job, Location.parse(dataset), plain)
    assert evaluation.num_samples == sum(map(len, samples))
    assert evaluation.ne is not None


def with_price(directory: Path, price: str, kind: str, default: str = DEFAULT) -> Path:
    """Write a job with two more columns."""
    columns = f"{SQL}, {price}::FLOAT AS price, {kind} AS kind"
    return changed(directory, *TWICE, (SQL, columns), TABLES, schema=SCHEMA + ADDED + default)


def prices_and_kinds(job: Path, dataset: Path, segment: int) -> tuple[set[float], int]:
    """Return the prices that training reads from a segment, and the number of look-ups of kinds."""
    opened = open_dataset(dataset)
    place = spec_of(opened, "float32").dense.index("price")
    reader, order = reader_of(job, dataset), order_of(load_job(job), opened)
    batches = [reader.read(s) for s in range(order.num_steps) if order.step(s).segment == segment]
    prices = {price for batch in batches for price in batch.dense[:, place].tolist()}
    return prices, sum(int(b.sparse["kind"].lengths().sum()) for b in batches)


@pytest.mark.slow
@pytest.mark.parametrize(("default", "answer"), [(DEFAULT, 2.5), ("", 0.0)])
def test_segment_without_an_added_feature_trains_as_one_that_was_built_with_its_default(
    default: str, answer: float, job: Path, logs: list[Path], tmp_path: Path
) -> None:
    value = "2.5" if default else "NULL"
    added = with_price(tmp_path / "added", "1.5", "user % 3", default)
    written = with_price(tmp_path / "written", value, "NULL::BIGINT", default)
    later = built_and_appended(tmp_path / "later", [job, added], logs)
    always = built_and_appended(tmp_path / "always", [written, added], logs)
    assert prices_and_kinds(added, later, 0) == ({answer}, 0)
    prices, num_kinds = prices_and_kinds(added, later, 1)
    assert prices == {1.5}
    assert num_kinds > 0
    summary = run_job(added, later, tmp_path / "later-run", embedding="cached")
    assert summary.ne == run_job(added, always, tmp_path / "always-run").ne
    assert_equal(tmp_path / "later-run", tmp_path / "always-run")
