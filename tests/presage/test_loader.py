"""`DataLoader`: what each rank gets, where a loop resumes, worker processes, and refusals."""

import copy
import json
import pickle
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data._utils import worker as torch_worker

import presage
from presage.batch import Batch
from presage.pipelines.build import build
from presage.schemas.dataset.opened import OpenDataset, open_dataset, select_segments
from presage.schemas.errors import SchemaError
from presage.schemas.layout import FILE_SHIFT, JOB, SCHEMA
from presage.trainer.embedding.collections import EmbeddingBagCollection
from tests.pipelines.logs import request, write_job, write_log
from tests.trainer.growing import commit, grown_versions
from tests.trainer.make_dataset import BLOCK_SAMPLES, make_samples
from tests.trainer.runs import SEGMENTS, reader_of, small_dataset
from tests.trainer.test_own_loops import job_tables
from tests.trainer.test_reader import SPARSE, sample_of

ORDER: dict[str, Any] = {"batch_samples": 64, "epochs": 2, "shuffle": True, "seed": 5}
Sample = tuple[Any, ...]
T = TypeVar("T")


@cache
def opened() -> OpenDataset:
    return open_dataset(small_dataset())


def loader(**options: Any) -> presage.DataLoader:
    return presage.DataLoader(opened(), **{"dtype": "float64", **ORDER, **options})


def samples_of(batch: Batch) -> list[Sample]:
    """Return the samples of a batch without padding, read slowly from its jagged tensor."""
    sparse = [bags_of(batch, feature) for feature in SPARSE]
    rows = zip(
        batch.kept["session"].tolist(),
        batch.labels.tolist(),
        batch.weights.tolist(),
        batch.dense_features.tolist(),
        strict=True,
    )
    samples: list[Sample] = [
        (key, int(label), weight, tuple(dense), *(tuple(bags[i]) for bags in sparse))
        for i, (key, label, weight, dense) in enumerate(rows)
    ]
    return samples[: batch.num_samples]


def flat(lists: Iterable[Iterable[T]]) -> list[T]:
    return list(chain.from_iterable(lists))


def bags_of(batch: Batch, feature: str) -> list[list[int]]:
    """Return the rows that each sample looks up."""
    jagged, inverse = (
        batch.sparse_features[feature],
        batch.sparse_features.inverse_indices_or_none(),
    )
    values, offsets = jagged.values().tolist(), jagged.offsets().tolist()
    bags = [values[start:end] for start, end in pairwise(offsets)]
    if inverse is None:
        return bags
    return [bags[i] for i in inverse[1][list(inverse[0]).index(feature)].tolist()]


@cache
def logged_blocks() -> list[list[list[Sample]]]:
    """Return the samples of each training block of each segment, as they were logged."""
    tables = opened().job.data.tables
    segments: list[list[list[Sample]]] = []
    for index, segment in enumerate(opened().segments):
        logs = [
            [sample_of(row, tables) for row in make_samples(a + b, 100 * index + n).to_pylist()[:a]]
            for n, (a, b) in enumerate(SEGMENTS[index])
        ]
        blocks = segment.block_ids[segment.positions("train")].tolist()
        starts = [(b >> FILE_SHIFT, (b & ((1 << FILE_SHIFT) - 1)) * BLOCK_SAMPLES) for b in blocks]
        segments.append([logs[file][i : i + BLOCK_SAMPLES] for file, i in starts])
    return segments


@cache
def logged_steps() -> list[list[list[Sample]]]:
    """Return the samples of each block of each step, as they were logged."""
    order = opened().order(64, 2, "blocks", 5)
    steps = map(order.step, range(order.num_steps))
    return [[logged_blocks()[s.segment][p] for p in s.positions.tolist()] for s in steps]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "deduplicated"), [(n, n % 2 == 0) for n in range(1, 6)])
def test_ranks_split_each_logged_batch_by_blocks(world_size: int, deduplicated: bool) -> None:
    options = {"world_size": world_size, "deduplicated": deduplicated}
    loaders = [loader(rank=rank, **options) for rank in range(world_size)]
    num_steps = 0
    for blocks, *batches in zip(logged_steps(), *loaders, strict=True):
        per_rank = [samples_of(batch) for batch in batches]
        assert flat(per_rank) == flat(blocks)
        sizes = {sum(map(len, blocks[i:j])) for i in range(5) for j in range(i, 5)}
        assert {len(samples) for samples in per_rank} <= sizes  # whole blocks
        weight = sum(sample[2] for sample in flat(blocks))
        assert {batch.global_weight for batch in batches} == {weight}
        assert {(b.epoch, b.step) for b in batches} == {divmod(num_steps, 16)}
        num_steps += 1
    assert num_steps == 32


@pytest.mark.parametrize("deduplicated", [True, False])
def test_equal_batches_are_padded_by_samples_of_weight_zero(deduplicated: bool) -> None:
    options = {"world_size": 5, "deduplicated": deduplicated, "shuffle": False, "epochs": 1}
    without = [loader(rank=rank, **options) for rank in range(5)]
    padded = [loader(rank=rank, equal_batches=True, **options) for rank in range(5)]
    num_empty = 0
    for *some, equal in zip(*without, zip(*padded, strict=True), strict=True):
        assert len({len(batch.labels) for batch in equal}) == 1
        assert len(equal[0].labels) == max(batch.num_samples for batch in some)
        for batch, full in zip(some, equal, strict=True):
            assert batch.num_padding == 0
            assert samples_of(batch) == samples_of(full)
            ends = slice(full.num_samples, None)
            for tensor in (full.weights, full.labels, full.dense_features, full.kept["session"]):
                assert not tensor[ends].any()
            assert all(bags_of(full, f)[ends] == [[]] * full.num_padding for f in SPARSE)
            assert full.sparse_features.stride() == len(full.labels)
            num_empty += not batch.num_samples
    assert num_empty >= 16  # five ranks, four blocks


def test_evaluation_split_is_passed_once_by_all_ranks() -> None:
    options = {"split": "evaluation", "epochs": 1, "shuffle": False, "world_size": 3}
    loaders = [loader(rank=rank, **options) for rank in range(3)]
    logged: list[Sample] = []
    for number, (_, num_evaluation) in enumerate(SEGMENTS[0]):
        rows = make_samples(sum(SEGMENTS[0][number]), number).to_pylist()[-num_evaluation:]
        logged += [sample_of(row, opened().job.data.tables) for row in rows]
    for _ in range(2):
        found = flat(map(samples_of, flat(zip(*loaders, strict=True))))
        assert found == logged
    job = small_dataset().parent / "job" / JOB
    labels = [b.labels for b in reader_of(job, small_dataset()).evaluation_batches()]
    from_job = presage.DataLoader.from_job(job, small_dataset(), split="evaluation")
    assert all(map(torch.equal, labels, (b.labels for b in from_job)))


def test_selected_dataset_gives_segments_and_split() -> None:
    selected = presage.Dataset(small_dataset()).select(segments=[opened().segments[0].id])
    first = presage.DataLoader(selected, batch_samples=64)
    assert sum(batch.num_samples for batch in first) == 733
    evaluation = selected.select(split="evaluation")
    assert sum(b.num_samples for b in presage.DataLoader(evaluation, batch_samples=64)) == 80
    job = small_dataset().parent / "job" / JOB
    assert len(presage.DataLoader.from_job(job, evaluation)) == 2
    with pytest.raises(ValueError, match="split must be 'evaluation', the selected split"):
        presage.DataLoader(evaluation, batch_samples=64, split="train")


def test_arguments_come_from_a_job() -> None:
    job = small_dataset().parent / "job" / JOB
    from_job = presage.DataLoader.from_job(job, small_dataset(), rank=1, world_size=2)
    assert from_job.state_dict() == loader(rank=0, world_size=3).state_dict()
    assert (len(from_job), from_job.epochs, from_job.rank) == (32, 2, 1)


def test_first_batch_is_that_of_the_loop() -> None:
    running = loader(rank=1, world_size=2)
    assert samples_of(running.first_batch()) == samples_of(next(iter(running)))


def test_loop_leaves_the_number_of_torch_threads_to_all_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        next(iter(loader()))
        with ThreadPoolExecutor(1) as later:
            numbers = torch.get_num_threads(), later.submit(torch.get_num_threads).result()
    finally:
        torch.set_num_threads(before)
    assert numbers == (3, 3)


class RefuseToCompute(TorchDispatchMode):
    """Refuses torch operators that are more than views."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.is_view or func is torch.ops.aten.lift_fresh.default, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("deduplicated", [False, True])
def test_reading_runs_no_torch_operator_that_would_start_threads(deduplicated: bool) -> None:
    running = loader(deduplicated=deduplicated, lookups=True)
    with RefuseToCompute():
        running.first_batch()


def test_columns_are_selected() -> None:
    batch = next(iter(loader(features=["item", "price", "clicked"], keep=["page"])))
    assert batch.sparse_features.keys() == ["clicked", "item"]
    assert batch.dense_features.shape == (64, 1)
    assert list(batch.kept) == ["page"]
    whole = next(iter(loader()))
    assert list(whole.kept) == ["session"]
    for feature in ("clicked", "item"):
        assert bags_of(batch, feature) == bags_of(whole, feature)
    expanded = next(iter(loader(features=["item", "price", "clicked"], deduplicated=False)))
    assert bags_of(expanded, "clicked") == bags_of(whole, "clicked")


# ---- State ----

FEW: dict[str, Any] = {"features": ["item", "price"], "keep": []}
"""Columns that are read fastest."""
NUM_POINTS = [8, pytest.param(50, marks=pytest.mark.nightly)]
"""Numbers of random points at which a loop is interrupted."""


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as a checkpoint in JSON returns it."""
    return json.loads(json.dumps(state))


def keys_of(batch: Batch) -> list[float]:
    """Return the price of each sample without padding; prices differ."""
    return batch.dense_features[: batch.num_samples, 0].tolist()


def state_after_steps(count: int, **options: Any) -> dict[str, Any]:
    """Return the state of a loop that stopped after some steps, with batches read ahead."""
    running = loader(**options)
    batches = iter(running)
    assert len(list(islice(batches, count))) == count
    return through_json(running.state_dict())


def logged_keys() -> list[list[float]]:
    """Return what `keys_of` returns of the batches of one rank."""
    return [[sample[3][0] for sample in flat(blocks)] for blocks in logged_steps()]


@pytest.mark.slow
@pytest.mark.parametrize("num_points", NUM_POINTS)
def test_resumed_at_random_points_gives_the_same_batches_at_any_world_size(num_points: int) -> None:
    steps, rng = logged_keys(), np.random.default_rng(3)
    for point in rng.integers(0, len(steps) + 1, num_points).tolist():
        before, other = rng.integers(1, 6, 2).tolist()
        options = {**FEW, "equal_batches": bool(rng.integers(2))}
        state = state_after_steps(point, rank=0, world_size=before, **options)
        assert state_after_steps(point, rank=before - 1, world_size=before, **options) == state
        for world_size in (before, other):
            ranks = range(world_size)
            resumed = [loader(rank=rank, world_size=world_size, **options) for rank in ranks]
            for each in resumed:
                each.load_state_dict(state)
                assert each.state_dict() == state
            rest = [flat(map(keys_of, batches)) for batches in zip(*resumed, strict=True)]
            assert rest == steps[point:], (point, before, world_size)


def test_state_names_the_last_batch_and_the_next_iteration_starts_from_the_beginning() -> None:
    running = loader(epochs=1)
    assert running.state_dict()["step"] == -1
    batch = None
    for batch in islice(running, 3):
        assert running.state_dict() == running.state_after(batch)
    assert (running.state_dict()["epoch"], running.state_dict()["step"]) == (0, 2)
    assert next(iter(running)).step == 0
    assert batch is not None
    running.load_state_dict(running.state_after(batch))
    assert [b.step for b in running] == list(range(3, 16))
    running.load_state_dict(running.state_dict())  # after the last batch
    assert list(running) == []
    assert len(list(running)) == 16
    again = loader(epochs=3)
    again.load_state_dict(running.state_dict())
    assert next(iter(again)).epoch == 1


OTHERS = {
    "batch size": ({"batch_samples": 32}, "batch_samples=64, but the loader has batch_samples=32"),
    "seed": ({"seed": 6}, "seed=5, but the loader has seed=6"),
    "shuffle": ({"shuffle": False}, "shuffle=True, seed=5, but the loader has shuffle=False"),
    "split": ({"split": "evaluation", "epochs": 1, "shuffle": False}, "split=train"),
}


@pytest.mark.parametrize(("options", "message"), OTHERS.values(), ids=OTHERS)
def test_state_of_another_order_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message) as caught:
        loader(**options).load_state_dict(loader().state_dict())
    assert len(str(caught.value).splitlines()) == 1


def test_state_of_other_segments_epochs_or_workers_is_refused() -> None:
    first = presage.DataLoader(select_segments(opened(), [opened().segments[0].id]), **ORDER)
    running = loader()
    *_, batch = islice(running, 20)
    last = running.state_after(batch)
    with pytest.raises(SchemaError, match=r"num_segments=2, .*but the loader has num_segments=1"):
        first.load_state_dict(last)
    with pytest.raises(SchemaError, match="epoch 1, counted from 0, but epochs=1; raise epochs"):
        loader(epochs=1).load_state_dict(last)
    with pytest.raises(SchemaError, match="worker process 1 of 2; load it by a StatefulDataL"):
        loader().load_state_dict({**last, "worker": 1, "num_workers": 2})
    with pytest.raises(SchemaError, match="lacks epoch, step, split"):
        loader().load_state_dict({})
    later = presage.DataLoader(select_segments(opened(), [opened().segments[1].id]), **ORDER)
    with pytest.raises(SchemaError, match="segments_sha256="):
        later.load_state_dict(first.state_dict())
    next(iter(first))
    running.load_state_dict(first.state_dict())  # segments were appended in the first epoch
    assert next(iter(running)).step == 1


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2; pass world_size"):
        loader(rank=2, world_size=2)
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
        loader(epochs=0)
    with pytest.raises(ValueError, match="split must be 'train' or 'evaluation', got 'test'"):
        loader(split="test")
    with pytest.raises(ValueError, match="evaluation split is passed once"):
        loader(split="evaluation")
    with pytest.raises(SchemaError, match="multiple of block_samples, got 60 and 16; use 48"):
        loader(batch_samples=60)
    with pytest.raises(SchemaError, match="feature is called 'itme'; did you mean 'item'"):
        loader(features=["itme"])
    with pytest.raises(SchemaError, match="must include a sparse feature; add one of user"):
        loader(features=["price"])
    with pytest.raises(SchemaError, match="no samples in its evaluation split"):
        presage.DataLoader(
            select_segments(opened(), [opened().segments[1].id]),
            batch_samples=64,
            split="evaluation",
        )
    with pytest.raises(TypeError, match="has no length"):
        len(loader(follow=True))
    selected = presage.Dataset(small_dataset()).select(segments=[opened().segments[1].id])
    with pytest.raises(SchemaError, match="selection has no samples in its evaluation split"):
        presage.DataLoader(selected, batch_samples=64, split="evaluation")


@pytest.mark.slow
def test_dataset_without_a_label_is_refused_by_name(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job")
    schema = tmp_path / "job" / SCHEMA
    schema.write_text(schema.read_text().replace('tag: "label"', 'tag: "kept"'))
    write_log(tmp_path / "log", num_rows=200, seed=1)
    build(request(job, tmp_path / "log", tmp_path / "dataset"))
    with pytest.raises(SchemaError, match=r"dataset has no label, .* in .*/dataset; tag a column"):
        presage.DataLoader(tmp_path / "dataset", batch_samples=64)


WRONG = {
    "text for a number": ({"batch_samples": "64"}, "batch_samples must be an integer, got '64'"),
    "float for a number": ({"epochs": 1.5}, "epochs must be an integer, got 1.5"),
    "no rank": ({"rank": None, "world_size": 2}, "rank must be an integer, got None"),
    "seed beyond 64 bits": ({"seed": 1 << 70}, "seed must be below 2\\*\\*63"),
    "shuffle as in a job": ({"shuffle": "none"}, "shuffle must be True or False, got 'none'"),
    "type of integers": ({"dtype": "int64"}, "dtype must be 'float32' or 'float64', got 'int64'"),
    "empty split": ({"split": ""}, "split must be 'train' or 'evaluation', got ''"),
    "one feature": ({"features": "item"}, "features must be a list of names, got 'item'"),
    "kept column": ({"keep": "session"}, "keep must be a list of names, got 'session'"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_arguments_of_wrong_types_are_refused_at_once(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        loader(**options)


NO_STATES = {
    "number": (5, "must be that of a DataLoader, got 5; pass what its state_dict"),
    "step beyond the epoch": ({"step": 16}, "after step 16 of epoch 0, but an epoch has"),
    "negative epoch": ({"epoch": -1}, "after step -1 of epoch -1, but an epoch has"),
    "text": ({"step": "3"}, "step must be an integer, got '3'"),
}


@pytest.mark.parametrize(("change", "message"), NO_STATES.values(), ids=NO_STATES)
def test_what_is_no_state_is_refused(change: Any, message: str) -> None:
    state = {**loader().state_dict(), **change} if isinstance(change, dict) else change
    with pytest.raises(SchemaError, match=message):
        loader().load_state_dict(state)


def test_torch_loader_that_would_batch_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="pass batch_size=None"):
        next(iter(TorchLoader(loader())))


# ---- Worker processes ----


class Workers:
    """What torchdata's StatefulDataLoader does with n workers, in this process."""

    def __init__(self, running: presage.DataLoader, num_workers: int) -> None:
        self._loaders = [pickle.loads(pickle.dumps(running)) for _ in range(num_workers)]
        self._iterators: list[Iterator[Batch] | None] = [None] * num_workers
        self._next = 0

    def start(self, monkeypatch: pytest.MonkeyPatch, state: dict[str, Any] | None = None) -> None:
        self._monkeypatch = monkeypatch
        self._next = 0 if state is None else state["next"]
        for index, each in enumerate(self._loaders):
            self._enter(index)
            if state is not None:
                each.load_state_dict(state["workers"][index])
            self._iterators[index] = iter(each)

    def _enter(self, index: int) -> None:
        info = torch_worker.WorkerInfo(
            index, len(self._loaders), seed=0, dataset=self._loaders[index]
        )
        self._monkeypatch.setattr(torch_worker, "_worker_info", info)

    def take(self, count: int) -> list[Batch]:
        batches: list[Batch] = []
        while len(batches) < count and any(i is not None for i in self._iterators):
            index, self._next = self._next, (self._next + 1) % len(self._loaders)
            iterator = self._iterators[index]
            self._enter(index)
            batch = None if iterator is None else next(iterator, None)
            if batch is None:
                self._iterators[index] = None
            else:
                batches.append(batch)
        return batches

    def state_dict(self) -> dict[str, Any]:
        states: list[dict[str, Any]] = []
        for index, each in enumerate(self._loaders):
            self._enter(index)
            states.append(each.state_dict())
        return {"workers": states, "next": self._next}


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_workers_take_turns_and_resume(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [flat(blocks) for blocks in logged_steps()]
    for point in (0, 1, 4, 17, 31, 32):
        running = Workers(loader(), num_workers)
        running.start(monkeypatch)
        before = running.take(point)
        state = through_json(running.state_dict())
        resumed = Workers(loader(rank=0, world_size=1), num_workers)
        resumed.start(monkeypatch, state)
        assert [samples_of(b) for b in [*before, *resumed.take(99)]] == steps
        if before and num_workers > 1:  # the state of the last batch fits any number of workers
            monkeypatch.setattr(torch_worker, "_worker_info", None)
            other = loader()
            other.load_state_dict(other.state_after(before[-1]))
            fewer = Workers(other, num_workers - 1)
            fewer.start(monkeypatch)
            assert [samples_of(b) for b in fewer.take(99)] == steps[point:]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_spawned_workers_give_the_batches_in_order_and_use_a_loaded_state_once(
    persistent: bool,
) -> None:
    steps, running = [flat(blocks) for blocks in logged_steps()], loader(lookups=True)
    spawned = TorchLoader(
        running,
        batch_size=None,
        num_workers=2,
        multiprocessing_context="spawn",
        persistent_workers=persistent,  # started before the state is loaded
    )
    first = list(islice(spawned, 7))
    assert [samples_of(batch) for batch in first] == steps[:7]
    running.load_state_dict(running.state_after(first[-1]))
    assert [samples_of(batch) for batch in spawned] == steps[7:]
    assert [samples_of(batch) for batch in islice(spawned, 3)] == steps[:3]
    assert [batch.step for batch in islice(running, 2)] == [0, 1]


class _Forked:
    """The workers of one iteration, as `_MultiProcessingDataLoaderIter` forks them, in turn."""

    def __init__(self, loader: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.steps: list[int] = []
        for index in range(2):
            forked = copy.copy(loader.dataset)  # shares memory
            info = torch_worker.WorkerInfo(index, 2, seed=seed + index, dataset=forked)
            with monkeypatch.context() as patch:
                patch.setattr(torch_worker, "_worker_info", info)
                self.steps += [16 * batch.epoch + batch.step for batch in forked]


def test_forked_workers_use_a_loaded_state_once(monkeypatch: pytest.MonkeyPatch) -> None:
    running = loader(features=["item"], keep=[], shuffle=False)
    wrapped = TorchLoader(running, batch_size=None, num_workers=2)
    for seed in (5, 6):
        running.load_state_dict({**running.state_dict(), "epoch": 1, "step": 12})
        assert sorted(_Forked(wrapped, monkeypatch, seed).steps) == [29, 30, 31]
        assert sorted(_Forked(wrapped, monkeypatch, seed).steps) == list(range(32))
        assert sorted(_Forked(wrapped, monkeypatch, seed + 7).steps) == list(range(32))


def test_workers_that_deliver_in_any_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = TorchLoader(loader(), batch_size=None, num_workers=2, in_order=False)
    message = "^in_order must be True in torch's DataLoader, got False: the state of a loop"
    with pytest.raises(ValueError, match=message):
        _Forked(wrapped, monkeypatch, 1)
    options: Any = {"multiprocessing_context": "spawn", "num_workers": 2, "in_order": False}
    with pytest.raises(ValueError, match=message):
        iter(TorchLoader(loader(), batch_size=None, **options))


def stateful(running: presage.DataLoader, method: str | None) -> Any:
    """Return torchdata's loader around ours, with two worker processes or none."""
    module = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed; run make setup"
    )
    num_workers = 2 if method else 0
    return module.StatefulDataLoader(
        running, batch_size=None, num_workers=num_workers, multiprocessing_context=method
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_points", NUM_POINTS)
def test_stateful_dataloader_resumes_at_random_points_and_at_another_world_size(
    num_points: int,
) -> None:
    steps, rng = logged_keys(), np.random.default_rng(4)
    for number, point in enumerate(rng.integers(0, len(steps) + 1, num_points).tolist()):
        method = "spawn" if number == 20 else None
        before, after = rng.integers(1, 5, 2).tolist()
        if method == "spawn":
            before, after = 4, 1
        options = {**FEW, "equal_batches": bool(rng.integers(2))}
        running = stateful(loader(rank=before - 1, world_size=before, **options), method)
        assert len(list(islice(running, point))) == point
        state, rest = through_json(running.state_dict()), list[list[list[float]]]()
        for rank in range(after):
            resumed = stateful(loader(rank=rank, world_size=after, **options), method)
            resumed.load_state_dict(state)
            rest.append(list(map(keys_of, resumed)))
        found = [flat(parts) for parts in zip(*rest, strict=True)]
        assert found == steps[point:], (point, before, after, method)


# ---- Following, look-ups, imports ----


@pytest.mark.slow
def test_following_waits_for_segments_and_then_for_the_next_epoch(tmp_path: Path) -> None:
    versions = grown_versions()
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    commit(versions[0], dataset)
    options: dict[str, Any] = {**ORDER, "follow": True, "rank": 1, "world_size": 2}
    following = presage.DataLoader(dataset, **options)
    whole = presage.DataLoader(versions[-1], **{**options, "follow": False})
    found = iter(following)
    batches = [next(found) for _ in range(12)]  # all steps of the first segment
    for version in versions[1:]:
        timer = threading.Timer(0.05, commit, (version, dataset))
        timer.start()
        batches.append(next(found))  # waits
        timer.join()
    state = following.state_dict()
    batches += found
    expected = [samples_of(batch) for batch in whole]
    assert [samples_of(batch) for batch in batches] == expected
    whole.load_state_dict(state)
    assert next(iter(whole)).step == state["step"] + 1
    with pytest.raises(SchemaError, match="selection of segments cannot be followed"):
        presage.DataLoader(
            select_segments(open_dataset(dataset), [open_dataset(dataset).segments[0].id]),
            batch_samples=64,
            follow=True,
        )


@pytest.mark.parametrize("equal_batches", [False, True])
@pytest.mark.parametrize("rank", [0, 4])
def test_prepared_lookups_are_used_by_our_collections(
    rank: int, equal_batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pooled: list[torch.Tensor] = []
    options = {"world_size": 5, "dtype": "float32", "equal_batches": equal_batches}
    for lookups in (False, True):
        collection = EmbeddingBagCollection(job_tables())
        batch = next(iter(loader(rank=rank, lookups=lookups, **options))).to("cpu")
        assert len(batch.labels) == (16 if rank == 0 or equal_batches else 0)
        with monkeypatch.context() as patch:
            if lookups:
                patch.setattr("presage.trainer.data.kjt_lookups.table_lookups", None)
            pooled.append(collection(batch.sparse_features).values())
        pooled[-1].sum().backward()
    torch.testing.assert_close(pooled[0], pooled[1])
