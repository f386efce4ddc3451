"""What a GPU is fed, on any machine; a run on one against the processor's, where there is one."""

import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from presage.schemas.config.job import Job, load_job
from presage.schemas.config.train import DenseOptimizerConfig, ModelConfig
from presage.schemas.dataset.opened import OpenDataset, open_dataset
from presage.schemas.dataset.run_next_uses import SharedNextUses
from presage.schemas.errors import SchemaError
from presage.schemas.run.records import SUMMARY, read_summary
from presage.schemas.storage.location import Location
from presage.trainer.components import build_components, order_of, uses_shared_features
from presage.trainer.data.collate import CollatedBatch, move_batch
from presage.trainer.data.decode import spec_of
from presage.trainer.data.kjt_lookups import batch_from_kjt
from presage.trainer.data.transfer import to_device
from presage.trainer.device_compute import DeviceMicrobatchCompute
from presage.trainer.embedding.device_embedding import DeviceLookups
from presage.trainer.embedding.kernels.interface import ArenaRows
from presage.trainer.embedding.module import MicrobatchLookups
from presage.trainer.evaluation.evaluate import evaluate_run
from presage.trainer.options import TrainOptions
from presage.trainer.run.checkpoints import copy_bytes_of
from presage.trainer.step import MicrobatchCompute, PhaseTimer, train_batch
from presage.trainer.steps import Horizon, Span, StepReader
from tests.trainer.device_jobs import MODELS, with_device
from tests.trainer.fake_device import (
    DEVICE,
    DeviceMode,
    DeviceTensor,
    MixedDevicesError,
    to_fake_device,
)
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import assert_same_bits, losses_of, parts_of, reader_of, run_job

TIMER = PhaseTimer(perf_counter)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of six steps."""
    folder = tmp_path_factory.mktemp("few")
    return make_dataset(folder / "dataset", write_job(folder / "job"), [[(120, 50)], [(64, 0)]])


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return every tensor of a part of a batch."""
    if isinstance(value, torch.Tensor):
        return [value]
    if is_dataclass(value):
        return [t for f in fields(value) for t in tensors_of(getattr(value, f.name))]
    return (
        [t for part in value.values() for t in tensors_of(part)] if hasattr(value, "values") else []
    )


@pytest.mark.parametrize("expanded", [False, True])
def test_every_tensor_of_a_batch_is_moved(expanded: bool, dataset: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job")
    batch = reader_of(job, dataset, expanded=expanded).read(0)
    parts = {name: getattr(batch, name) for name in ("labels", "dense", "lookups", "groups")}
    there = to_device(parts, torch.device("meta"))
    found, wanted = tensors_of(there), tensors_of(parts)
    assert len(found) == len(wanted) > 10
    assert {t.device.type for t in found} == {"meta"}
    assert [t.shape for t in found] == [t.shape for t in wanted]
    assert to_device(parts, torch.device("cpu")) is parts


def test_missing_device_is_refused_before_anything_starts(
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
def fake_device(monkeypatch: pytest.MonkeyPatch, uploads: list[tuple[int, ...]]) -> None:
    """Let `train.device: cuda` mean that device."""

    def named(name: str) -> torch.device:
        return DEVICE if name == "cuda" else torch.device(name)

    def unfused(config: DenseOptimizerConfig, parameters: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=config.learning_rate)  # fused asks who made a device

    save = torch.save

    def from_here(state: Any, file: Any) -> None:  # a GPU's tensors are saved as they are
        save(tree_map(lambda t: t.cpu() if isinstance(t, DeviceTensor) else t, state), file)

    monkeypatch.setattr("torch.save", from_here)
    for where in (
        "presage.trainer.components.device_of",
        "presage.trainer.evaluation.evaluate.device_of",
        "presage.trainer.train.device_of",
        "presage.trainer.steps.device_of",
    ):
        monkeypatch.setattr(where, named)
    monkeypatch.setattr("presage.trainer.components.dense_optimizer", unfused)


@pytest.mark.slow
@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize(
    ("model", "embedding"),
    [*((model, "plain") for model in MODELS.values()), (MODELS["dlrm"], "cached")],
    ids=[*MODELS, "dlrm, cached"],
)
def test_run_on_a_device_mixes_in_no_tensor_of_the_processor(
    model: str, embedding: str, few: Path, tmp_path: Path
) -> None:
    cpu = write_job(tmp_path / "cpu", model=model)
    run_job(cpu, few, tmp_path / "run-cpu", embedding=embedding)
    cuda = with_device(write_job(tmp_path / "cuda", model=model), "cuda")
    run = tmp_path / "run-cuda"
    with DeviceMode() as mode:
        run_job(cuda, few, run, embedding=embedding, steps=2)
        summary = run_job(cuda, few, run, embedding=embedding, resume=True)
        found = evaluate_run(cuda, Location.parse(few), run)
    assert mode.calls.total() > 1000
    assert summary.ne == pytest.approx(read_summary(tmp_path / "run-cpu" / SUMMARY).ne, rel=1e-9)
    assert found.ne == summary.ne
    np.testing.assert_allclose(losses_of(run), losses_of(tmp_path / "run-cpu"), rtol=1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize(
    ("policy", "rows", "files"),
    [
        ("ttl", "null", "log"),
        pytest.param("ttl", "310", "mmap", marks=pytest.mark.nightly),
        ("belady", "310", "mmap"),
    ],
)
def test_rows_cached_on_the_device_have_the_bits_of_rows_copied_in_each_step(
    policy: str, rows: str, files: str, few: Path, tmp_path: Path
) -> None:
    changes = {"policy": policy, "rows": rows, "files": files, "lookahead": "2"}
    job = with_device(write_job(tmp_path / "job", every_steps="2", **changes), "cuda")
    with DeviceMode():
        run_job(job, few, tmp_path / "plain", embedding="plain")
        run_job(job, few, tmp_path / "cached", embedding="cached", steps=3)
        summary = run_job(job, few, tmp_path / "cached", embedding="cached", resume=True)
    assert_same_bits(tmp_path / "cached", tmp_path / "plain")
    if policy == "ttl":  # the second epoch has no new rows
        assert summary.fetched_rows > 0, "rows were evicted, and fetched again"


@pytest.mark.slow
@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_step_waits_for_the_loss_and_for_its_rows_alone(
    model: str, few: Path, tmp_path: Path, uploads: list[tuple[int, ...]]
) -> None:
    job_path = with_device(write_job(tmp_path / "job", model=model), "cuda")
    job = load_job(job_path)
    with DeviceMode() as mode:
        components = parts_of(job_path, few)
        reader = reader_of(job_path, few, find_shared=uses_shared_features(job.train))
        batch = None
        for _ in range(2):  # the second time, what is made once is there
            mode.calls.clear()
            uploads.clear()
            batch = move_batch(reader.read(0), job.train.model, DEVICE)
            train_batch(components, batch, TIMER)
    assert batch is not None
    num_rows = sum(len(lookup.rows) for lookup in batch.lookups.values())
    assert len(uploads) == 2  # the batch, and its rows with their state
    assert uploads[1] == (num_rows, job.train.embedding_dim + 1)
    assert mode.calls["upload"] == 0  # no copy besides
    assert mode.calls["download"] == mode.calls["read"] == 1


@pytest.mark.slow
@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_microbatches_of_a_replica_have_the_sums_of_the_processors(
    model: str, few: Path, tmp_path: Path, uploads: list[tuple[int, ...]]
) -> None:
    job_path = write_job(tmp_path / "job", model=model)
    config, components = load_job(job_path).train, parts_of(job_path, few)
    spec = spec_of(open_dataset(few), config.dtype)
    reader = reader_of(job_path, few, find_shared=uses_shared_features(config))
    with DeviceMode() as mode:
        on_device = DeviceMicrobatchCompute(components, TIMER, spec, config, DEVICE)
    with on_device, MicrobatchCompute(components, TIMER) as compute:
        for train_step in range(3):
            opened = reader.read_microbatches(train_step)
            compute.open(opened)
            total = compute.sums_of(opened).total()
            with DeviceMode() as mode:
                uploads.clear()
                device_tree = on_device.sums_of(opened)
            found = device_tree.total()
            count = len(opened.batches)
            assert count > 1
            assert mode.calls["read"] == 0
            assert train_step == 0 or mode.calls["upload"] == 0  # the first step copies constants
            assert mode.calls["download"] == count  # one for each microbatch
            assert len(uploads) >= count + 2  # besides parameters and rows
            assert found.weight == total.weight
            assert found.loss == pytest.approx(total.loss, rel=1e-12)
            for name in ("dense", "rows"):
                left, right = getattr(found, name), getattr(total, name)
                if name == "rows":
                    assert torch.equal(left.rows, right.rows)
                    left, right = left.sums, right.sums
                torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)
            compute.update(found)


def span_of(job: Job, dataset: OpenDataset) -> Span:
    """Return all steps of a dataset."""
    order = order_of(job, dataset)
    horizon = Horizon(end_step=order.num_steps, known_end=order.num_steps, is_final=True)
    return Span(dataset, order, horizon, SharedNextUses(dataset, order))


@pytest.mark.slow
@pytest.mark.usefixtures("fake_device")
def test_replica_that_joins_computes_a_step_with_initial_rows(few: Path, tmp_path: Path) -> None:
    job_path = with_device(write_job(tmp_path / "job"), "cuda")
    job, dataset = load_job(job_path), open_dataset(few)
    on_host = replace(job, train=replace(job.train, device="cpu"))
    spec = spec_of(dataset, job.train.dtype)
    components = build_components(spec, on_host.train)
    span, layouts = span_of(job, dataset), components.store.layouts
    with (
        DeviceMode(),
        StepReader(job.train, TrainOptions(), span, layouts, is_replica=True) as reader,
        DeviceMicrobatchCompute(components, TIMER, spec, job.train, DEVICE) as compute,
    ):
        opened = reader.take(0, range(reader.num_microbatches(0)))
        compute.warm_up(opened)
        first = compute.compute(opened).total()
    with MicrobatchCompute(components, TIMER) as compute:
        wanted = compute.sums_of(opened).total()
    assert first.loss == pytest.approx(wanted.loss, rel=1e-12)


def test_launcher_without_a_device_sizes_copies_for_replicas_that_have_one(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    job, dataset = load_job(write_job(tmp_path / "job", every_steps="2")), open_dataset(few)
    span = span_of(job, dataset)
    on_device = replace(job, train=replace(job.train, device="cuda"))
    assert copy_bytes_of(on_device, span, 0) == copy_bytes_of(job, span, 0) > 0


def test_fake_device_refuses_what_a_gpu_would() -> None:
    x = to_fake_device(torch.ones(3))
    with DeviceMode(), pytest.raises(MixedDevicesError):
        torch.add(x, torch.ones(3))
    with pytest.raises((RuntimeError, TypeError)):
        x.numpy()
    assert x.cpu().numpy().tolist() == [1, 1, 1]


DIM, NUM_SAMPLES = 3, 7


def draw_batch(num_features: int, seed: int, *, grouped: bool, weighted: bool) -> CollatedBatch:
    """Draw bags of features, two of which share a table, in groups of three neighbours."""
    rng = np.random.default_rng(seed)
    keys = [f"f{i}" for i in range(num_features)]
    num_tuples = [3 + i // 3 % 2 if grouped and i % 5 else NUM_SAMPLES for i in range(num_features)]
    lengths = [torch.from_numpy(rng.integers(0, 4, n)) for n in num_tuples]
    values = torch.from_numpy(rng.integers(0, 20, sum(int(each.sum()) for each in lengths)))
    inverse = [np.sort(rng.integers(0, n, NUM_SAMPLES)) for n in num_tuples]
    inverse = [
        np.arange(NUM_SAMPLES) if n == NUM_SAMPLES else i
        for n, i in zip(num_tuples, inverse, strict=True)
    ]
    weights = torch.rand(len(values), dtype=torch.float64) if weighted else None
    sparse = KeyedJaggedTensor(
        keys,
        values,
        weights,
        lengths=torch.cat(lengths),
        stride_per_key_per_rank=[[n] for n in num_tuples],
        inverse_indices=(keys, torch.from_numpy(np.stack(inverse))),
    )
    tables = {"both": tuple(keys[:2]), **{key: (key,) for key in keys[2:]}}
    return batch_from_kjt(sparse, tables, weighted=torch.float64 if weighted else None)


def draw_rows(batch: CollatedBatch, seed: int) -> dict[str, torch.Tensor]:
    """Draw the rows of each table."""
    torch.manual_seed(seed)
    return {
        table: torch.rand(len(lookup.rows), DIM, dtype=torch.float64)
        for table, lookup in batch.lookups.items()
    }


@pytest.mark.usefixtures("uploads")
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_all_tables_at_once_equal_one_after_the_other(
    seed: int, grouped: bool, weighted: bool, mean: bool
) -> None:
    batch = draw_batch(6, seed, grouped=grouped, weighted=weighted)
    rows = draw_rows(batch, seed)
    arenas = {table: ArenaRows(values, values.shape[1]) for table, values in rows.items()}
    one = MicrobatchLookups(batch, arenas, None, mean=mean)
    with DeviceMode():
        moved = move_batch(batch, ModelConfig(), DEVICE)
        both = DeviceLookups(moved, to_fake_device(torch.cat(list(rows.values()))), mean=mean)
        assert both.keys == one.keys
        expected, found = one.pool(), both.pool()
        factor = torch.rand_like(expected)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-12)
        loss, there_loss = (expected * factor).sum(), (found * to_fake_device(factor)).sum()
        if not weighted:
            entries, offsets = one.unpooled("both", "f1")
            there_entries, there_offsets = both.unpooled("both", "f1")
            assert torch.equal(there_entries.cpu(), entries)
            assert torch.equal(there_offsets.cpu(), offsets)
            loss, there_loss = loss + (entries**3).sum(), there_loss + (there_entries**3).sum()
        loss.backward()
        there_loss.backward()
        sums = both.sum_gradients().cpu()
    torch.testing.assert_close(sums, one.row_gradients().sums, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("uploads")
@pytest.mark.parametrize("seed", range(3))
def test_unique_tuples_have_the_vectors_of_one_table_after_the_other(seed: int) -> None:
    batch = draw_batch(6, seed, grouped=True, weighted=False)
    rows = draw_rows(batch, seed)
    arenas = {table: ArenaRows(values, values.shape[1]) for table, values in rows.items()}
    one = MicrobatchLookups(batch, arenas, None, mean=True)
    with DeviceMode():
        moved = move_batch(batch, ModelConfig(), DEVICE)
        both = DeviceLookups(moved, to_fake_device(torch.cat(list(rows.values()))), mean=True)
        expected, found = one.unique(), both.unique()
        assert expected.keys() == found.keys()
        for feature, vectors in expected.items():
            torch.testing.assert_close(found[feature].cpu(), vectors, rtol=1e-12, atol=1e-12)
        torch.cat(list(expected.values())).pow(2).sum().backward()
        torch.cat([found[feature] for feature in expected]).pow(2).sum().backward()
        sums = both.sum_gradients().cpu()
    torch.testing.assert_close(sums, one.row_gradients().sums, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("uploads")
def test_number_of_operators_does_not_grow_with_tables_and_features() -> None:
    calls: list[dict[str, int]] = []
    for num_features in (4, 40):
        batch = draw_batch(num_features, 1, grouped=False, weighted=False)
        values = torch.cat(list(draw_rows(batch, 1).values()))
        with DeviceMode() as mode:
            moved = move_batch(batch, ModelConfig(), DEVICE)
            mode.calls.clear()
            lookups = DeviceLookups(moved, to_fake_device(values), mean=True)
            lookups.pool().sum().backward()
            lookups.sum_gradients()
        views = {"view", "slice", "detach", "alias", "expand", "unsqueeze", "squeeze", "select"}
        calls.append({name: n for name, n in mode.calls.items() if name not in views})
    assert calls[0] == calls[1]
    assert calls[0]["_embedding_bag_forward_only"] == 2
