"""Evaluation sees its split once, in whole, and leaves training as it was."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from presage.schemas.config.job import load_job
from presage.schemas.dataset.manifest import canonical_json
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.layout import BLOCK, EVALUATION, TRAIN
from presage.schemas.storage.location import Location
from presage.trainer.components import Components
from presage.trainer.data.reader import Reader, prefetch
from presage.trainer.evaluation.evaluate import evaluate, evaluate_run
from presage.trainer.evaluation.metrics import Evaluation, columns_of
from presage.trainer.run.folder import verify_run
from presage.trainer.step import PhaseTimer, train_batch
from tests.trainer.exact_metrics import auc, calibration, gauc, normalized_entropy
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import parts_of, reader_of, run_job
from tests.trainer.stores import TableOf, whole
from tests.trainer.test_metrics import session_auc_by_hand


def evaluate_now(job: Path, dataset: Path, components: Components, reader: Reader) -> Evaluation:
    columns = columns_of(open_dataset(dataset), load_job(job).train)
    batches = reader.evaluation_batches()
    return evaluate(components, batches, columns)


def test_metrics_of_a_run_are_those_of_its_logits_sample_by_sample(
    dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job")
    components, reader = parts_of(job, dataset), reader_of(job, dataset)
    found = evaluate_now(job, dataset, components, reader)
    columns: list[list[np.ndarray]] = []
    for batch in reader.evaluation_batches():
        components.embedding.open_copies(batch, components.store)
        logits = components.model(batch).detach()
        key = batch.kept["session"]
        columns.append([key, key, *(t.numpy() for t in (batch.labels, logits, batch.weights))])
    key, time, *scored = (np.concatenate(c) for c in zip(*columns, strict=True))
    assert len(set(scored[2])) > 1, "weights must differ for this to say anything"
    assert found.num_samples == len(key) == 80
    assert found.ne == pytest.approx(normalized_entropy(*scored), rel=1e-13)
    assert found.auc == pytest.approx(auc(*scored), rel=1e-13)
    assert found.calibration == pytest.approx(calibration(*scored), rel=1e-13)
    assert found.gauc == pytest.approx(gauc(scored[0], scored[1], key, scored[2]), rel=1e-13)
    wanted, defined, one_class = session_auc_by_hand((key, time, *scored), None)
    assert found.session_auc == pytest.approx(wanted, rel=1e-13)
    assert (found.num_sessions, found.num_one_class_sessions) == (defined, one_class)
    assert found.auc_error == 0


def test_evaluation_reads_each_sample_of_its_split_once_and_no_other(
    dataset: Path, tmp_path: Path
) -> None:
    stored: list[np.ndarray] = []
    for segment in open_dataset(dataset).segments:
        held_back = segment.block_ids[segment.positions(EVALUATION)]
        files = sorted(Path(segment.directory / "samples").glob("*.parquet"))
        table = pa.concat_tables([pq.read_table(file) for file in files])
        chosen = np.isin(table[BLOCK].to_numpy(), held_back)
        stored.append(table["price"].to_numpy()[chosen])
    reader = reader_of(write_job(tmp_path / "job"), dataset)
    batches = list(reader.evaluation_batches())
    assert len(batches) > 1
    read = np.concatenate([batch.dense[:, 0].numpy() for batch in batches])
    wanted = np.concatenate(stored)
    assert len(set(wanted.tolist())) == len(wanted) == 80
    assert read.tolist() == wanted.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["user", "item"])
def test_gauc_of_another_key_groups_by_it(key: str, dataset: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job")
    text = job.read_text().replace("  cache:", f"  metrics: {{gauc_key: {key}}}\n  cache:")
    job.write_text(text)
    run_job(job, dataset, tmp_path / "run")
    found = evaluate_run(job, Location.parse(dataset), tmp_path / "run")
    assert found.session_auc is not None
    assert found.gauc != found.session_auc


def state_of(components: Components) -> list[bytes]:
    """Return the bits of everything that is trained."""
    dense = canonical_json({n: p.tolist() for n, p in components.model.named_parameters()})
    stored = [
        whole(TableOf(components.store, layout)) for layout in components.store.layouts.values()
    ]
    return [dense.encode(), *(a.tobytes() for rows, r in stored for a in (rows, r.values, r.state))]


def train_all(
    job: Path, dataset: Path, evaluate_every: int | None
) -> tuple[list[float], Components]:
    """Train with batches read ahead, and evaluate in between."""
    components, reader = parts_of(job, dataset), reader_of(job, dataset)
    scored = reader_of(job, dataset)
    losses: list[float] = []
    for batch in prefetch(reader.read, range(32), 2):
        assert batch.step.train_step == len(losses), "no training batch may be lost"
        timer = PhaseTimer(lambda: 0.0)
        losses.append(train_batch(components, batch, timer))
        if evaluate_every is not None and len(losses) % evaluate_every == 0:
            before = state_of(components)
            assert evaluate_now(job, dataset, components, scored).num_samples == 80
            assert state_of(components) == before, "evaluation must train nothing"
    return losses, components


@pytest.mark.slow
def test_evaluation_between_steps_leaves_the_bits_of_training(
    dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job")
    straight, plain = train_all(job, dataset, None)
    losses, components = train_all(job, dataset, 5)
    assert losses == straight
    assert state_of(components) == state_of(plain)
    assert isinstance(components.model, nn.Module)
    assert components.model.training
    assert torch.is_grad_enabled()


@pytest.mark.slow
@pytest.mark.parametrize("embedding", ["plain", "cached"])
def test_run_trains_each_training_block_once_and_no_evaluation_block(
    embedding: str, dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job")
    run = tmp_path / "run"
    run_job(job, dataset, run, embedding=embedding, steps=10)  # evaluates, then goes on
    run_job(job, dataset, run, embedding=embedding, resume=True)
    report = verify_run(run)
    assert report.problems == ()
    assert report.num_samples == 2 * 983
    opened, reader = open_dataset(dataset), reader_of(job, dataset)
    trained = {(b.step.segment, x) for b in map(reader.read, range(32)) for x in blocks(reader, b)}
    for index, segment in enumerate(opened.segments):
        held_back = {(index, x) for x in segment.block_ids[segment.positions(EVALUATION)]}
        assert not trained & held_back
        assert {(index, x) for x in segment.block_ids[segment.positions(TRAIN)]} <= trained


def blocks(reader: Reader, batch: object) -> list[int]:
    return reader.blocks_of(batch.step).tolist()  # type: ignore[attr-defined]


def test_segment_without_training_samples_is_evaluated(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", epochs="1")
    dataset = make_dataset(tmp_path / "dataset", job, [[(128, 0)], [(0, 60)]])
    run_job(job, dataset, tmp_path / "run")
    location = Location.parse(dataset)
    [first, second] = open_dataset(location).segments
    found = evaluate_run(job, location, tmp_path / "run", [second.id])
    assert found.num_samples == 60
    assert found.ne == evaluate_run(job, location, tmp_path / "run").ne
    assert evaluate_run(job, location, tmp_path / "run", [first.id]).num_samples == 0
