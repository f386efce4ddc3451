"""What a GPU is fed, on any machine; a run on one against the processor's, where there is one."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from schemas.config.train import DenseOptimizerConfig, TrainConfig
from schemas.errors import SchemaError
from schemas.run_log import SUMMARY, read_summary
from schemas.storage import Location
from tests.trainer.elsewhere import DEVICE, Elsewhere, MixedDevicesError, OnElsewhere, there
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import final_rows, losses_of, reader_of, run_job
from trainer.device import to_device
from trainer.embedding.module import Embedding
from trainer.evaluate import evaluate_run

MODELS = {
    "dlrm": "{name: dlrm, top_layers: [16]}",
    "dcn": "{name: dcn, cross_rank: 4}",
    "deepfm": "{name: deepfm}",
    "wide and deep": "{name: wide_deep}",
    "attention": "{name: attention, history: clicked, target: item, num_heads: 2}",
}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of six steps."""
    folder = tmp_path_factory.mktemp("few")
    return make_dataset(folder / "dataset", write_job(folder / "job"), [[(120, 50)], [(64, 0)]])


def with_device(job: Path, name: str) -> Path:
    """Name a device in a job file."""
    job.write_text(job.read_text().replace("  kernels:", f"  device: {name}\n  kernels:"))
    return job


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return every tensor of a batch."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, KeyedJaggedTensor):
        inverse = value.inverse_indices_or_none()
        return [value.values(), value.lengths(), value.offsets(), *(inverse or ())[1:]]
    if is_dataclass(value):
        return [t for f in fields(value) for t in tensors_of(getattr(value, f.name))]
    return (
        [t for part in value.values() for t in tensors_of(part)] if hasattr(value, "values") else []
    )


@pytest.mark.parametrize("expanded", [False, True])
def test_every_tensor_of_a_batch_is_moved(expanded: bool, dataset: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job")
    batch = reader_of(job, dataset, expanded=expanded).read(0)
    there = to_device(batch, torch.device("meta"))
    found, wanted = tensors_of(there), tensors_of(batch)
    assert len(found) == len(wanted) > 10
    assert {t.device.type for t in found} == {"meta"}
    assert [t.shape for t in found] == [t.shape for t in wanted]
    assert there.sparse.keys() == batch.sparse.keys()
    assert there.inverse_of("item").device.type == "meta"
    assert to_device(batch, torch.device("cpu")) is batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "embedding"),
    [
        ("dlrm", "plain"),
        ("dlrm", "cached"),
        ("dcn", "cached"),
        ("deepfm", "plain"),
        ("wide and deep", "cached"),
        ("attention", "plain"),
    ],
)
def test_copies_of_rows_train_with_the_bits_of_rows_where_they_lie(
    model: str, embedding: str, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path / "job", model=MODELS[model], kernels="torch")
    here = run_job(job, few, tmp_path / "here", embedding=embedding)
    monkeypatch.setattr("trainer.embedding.module.updates_in_place", lambda device: False)
    monkeypatch.setattr("trainer.embedding.module.to_device", lambda rows, device: rows)
    there = run_job(job, few, tmp_path / "there", embedding=embedding)
    assert losses_of(tmp_path / "here").tobytes() == losses_of(tmp_path / "there").tobytes()
    one, other = final_rows(tmp_path / "here"), final_rows(tmp_path / "there")
    assert {n: a.tobytes() for n, a in one.items()} == {n: a.tobytes() for n, a in other.items()}
    assert (here.ne, here.auc) == (there.ne, there.auc)


def test_device_that_is_not_there_is_refused_before_anything_starts(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    job = with_device(write_job(tmp_path / "job"), "cuda")
    message = (
        "train.device is cuda, but torch finds no CUDA device; "
        "use cpu, or install requirements-gpu.lock on a machine with a GPU"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        run_job(job, dataset, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        evaluate_run(job, Location.parse(dataset), tmp_path / "run")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `train.device: cuda` mean a device that refuses the processor's tensors."""
    begun = Embedding.__init__

    def named(name: str) -> torch.device:
        return DEVICE if name == "cuda" else torch.device(name)

    def begin(self: Embedding, tables: Any, config: TrainConfig, source: Any, **more: int) -> None:
        begun(self, tables, config, source, **more)
        self._device = named(config.device)

    def unfused(config: DenseOptimizerConfig, parameters: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=config.learning_rate)  # fused asks who made a device

    save = torch.save

    def from_here(state: Any, file: Any) -> None:  # a GPU's tensors are saved as they are
        save(tree_map(lambda t: t.cpu() if isinstance(t, Elsewhere) else t, state), file)

    monkeypatch.setattr("torch.save", from_here)
    for where in (
        "trainer.components.device_of",
        "trainer.evaluate.device_of",
        "trainer.train.device_of",
        "trainer.compute.device_of",
    ):
        monkeypatch.setattr(where, named)
    monkeypatch.setattr("trainer.device._pin", lambda value, device: there(value))
    monkeypatch.setattr("trainer.components.dense_optimizer", unfused)
    monkeypatch.setattr(Embedding, "__init__", begin)


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("model", "embedding"),
    [*((model, "plain") for model in MODELS.values()), (MODELS["dlrm"], "cached")],
    ids=[*MODELS, "dlrm, cached"],
)
def test_run_elsewhere_meets_no_tensor_of_the_processor(
    model: str, embedding: str, few: Path, tmp_path: Path
) -> None:
    cpu = write_job(tmp_path / "cpu", model=model)
    run_job(cpu, few, tmp_path / "run-cpu", embedding=embedding)
    cuda = with_device(write_job(tmp_path / "cuda", model=model), "cuda")
    run = tmp_path / "run-cuda"
    with OnElsewhere() as mode:
        run_job(cuda, few, run, embedding=embedding, steps=2)
        summary = run_job(cuda, few, run, embedding=embedding, resume=True)
        found = evaluate_run(cuda, Location.parse(few), run)
    assert mode.num_calls > 1000
    assert summary.ne == pytest.approx(read_summary(tmp_path / "run-cpu" / SUMMARY).ne, rel=1e-9)
    assert found.ne == summary.ne
    np.testing.assert_allclose(losses_of(run), losses_of(tmp_path / "run-cpu"), rtol=1e-10)


def test_elsewhere_refuses_what_a_gpu_would() -> None:
    x = there(torch.ones(3))
    with OnElsewhere(), pytest.raises(MixedDevicesError):
        torch.add(x, torch.ones(3))
    with pytest.raises((RuntimeError, TypeError)):
        x.numpy()
    assert x.cpu().numpy().tolist() == [1, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("embedding", ["plain", "cached"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_run_on_a_gpu_has_the_losses_of_the_processors(
    model: str, embedding: str, dataset: Path, tmp_path: Path
) -> None:
    runs: dict[str, np.ndarray] = {}
    for device in ("cpu", "cuda"):
        job = with_device(write_job(tmp_path / device, model=model), device)
        run = tmp_path / f"run-{device}"
        run_job(job, dataset, run, embedding=embedding, steps=9)
        summary = run_job(job, dataset, run, embedding=embedding, resume=True)
        assert summary.ne is not None
        runs[device] = losses_of(run)
    np.testing.assert_allclose(runs["cuda"], runs["cpu"], rtol=1e-10)
