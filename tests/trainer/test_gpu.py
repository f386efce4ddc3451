"""Runs on a GPU against those of the processors; `make test-gpu` runs them, and times a step."""

from pathlib import Path

import numpy as np
import pytest
import torch

from presage.schemas.config.job import load_job
from presage.schemas.run.records import SUMMARY, read_summary
from presage.schemas.storage.location import Location
from presage.trainer.components import uses_shared_features
from presage.trainer.data.collate import move_batch, single_microbatch
from presage.trainer.evaluation.evaluate import evaluate_run
from presage.trainer.step import PhaseTimer, WholeBatchCompute, train_batch
from tests.fork_server import without_forking
from tests.trainer.device_jobs import MODELS, with_device
from tests.trainer.make_dataset import write_job
from tests.trainer.processes import train_to_end
from tests.trainer.runs import assert_same_bits, losses_of, parts_of, reader_of, run_job

pytestmark = pytest.mark.gpu


def jobs(folder: Path, **changes: str) -> dict[str, Path]:
    """Write a job for both devices."""
    return {d: with_device(write_job(folder / d, **changes), d) for d in ("cpu", "cuda")}


@pytest.mark.parametrize("embedding", ["plain", "cached"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_run_has_the_losses_of_the_processors(
    model: str, embedding: str, dataset: Path, tmp_path: Path
) -> None:
    losses: dict[str, np.ndarray] = {}
    for device, job in jobs(tmp_path, model=model).items():
        run = tmp_path / f"run-{device}"
        run_job(job, dataset, run, embedding=embedding, steps=9)
        summary = run_job(job, dataset, run, embedding=embedding, resume=True)
        assert evaluate_run(job, Location.parse(dataset), run).ne == summary.ne
        losses[device] = losses_of(run)
    np.testing.assert_allclose(losses["cuda"], losses["cpu"], rtol=1e-10)


@pytest.mark.parametrize("embedding", ["cached", "lru", "uncached"])
def test_rows_have_the_bits_of_a_plain_run_on_the_gpu(
    embedding: str, dataset: Path, tmp_path: Path
) -> None:
    rows = "203" if embedding == "lru" else "null"
    job = jobs(tmp_path, rows=rows)["cuda"]
    for each in ("plain", embedding):
        run_job(job, dataset, tmp_path / each, embedding=each)
    assert_same_bits(tmp_path / embedding, tmp_path / "plain")


@pytest.mark.parametrize("arguments", [("--replicas", "2"), ("--restarts", "1")])
def test_forked_processes_have_the_losses_of_one_process(
    arguments: tuple[str, str], dataset: Path, tmp_path: Path
) -> None:
    both = jobs(tmp_path)
    run_job(both["cpu"], dataset, tmp_path / "one")
    run = tmp_path / "forked"
    with without_forking():  # beside CUDA's thread the fork server of the tests refuses to fork
        train_to_end(both["cuda"], dataset, run, *arguments)
    np.testing.assert_allclose(losses_of(run), losses_of(tmp_path / "one"), rtol=1e-10)
    found, expected = read_summary(run / SUMMARY).ne, read_summary(tmp_path / "one" / SUMMARY).ne
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_nothing_waits_for_the_gpu_before_the_update(
    model: str, dataset: Path, tmp_path: Path
) -> None:
    job_path = jobs(tmp_path, model=model)["cuda"]
    job, components = load_job(job_path), parts_of(job_path, dataset)
    reader = reader_of(job_path, dataset, find_shared=uses_shared_features(job.train))
    timer, device = PhaseTimer(lambda: 0.0), torch.device("cuda")
    for _ in range(2):  # the first time, tensors that stay are made
        train_batch(components, move_batch(reader.read(0), job.train.model, device), timer)
    compute = WholeBatchCompute(components, timer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = move_batch(reader.read(0), job.train.model, device)
        tree = compute.compute(single_microbatch(batch))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    compute.update(tree.total())
