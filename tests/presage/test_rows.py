"""Rows behind the planned cache, in a loop that Presage does not own, against rows in memory."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

import presage
from presage.batch import Batch
from presage.schemas.config.job import load_job
from presage.schemas.config.train import StoresConfig
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import PlanError, SchemaError
from presage.trainer.components import build_model, dense_optimizer
from presage.trainer.data.collate import features_of_tables
from presage.trainer.data.decode import spec_of
from presage.trainer.embedding.collections import EmbeddingBagCollection, set_rows
from presage.trainer.own_loops import EmbeddingRows
from presage.trainer.step import loss_of
from tests.conftest import REPOSITORY
from tests.presage.own_loop import (
    TRANSFORMS,
    Ranker,
    all_rows,
    bag_table,
    loader_of,
    optimizer_of,
    train_and_save,
    train_step,
)
from tests.shared import in_pairs
from tests.trainer.make_dataset import write_job
from tests.trainer.runs import final_rows, losses_of, rows_in, run_job, small_dataset
from tests.trainer.stores import running, start_store

KINDS = ("memory", "mmap", "log", "processes")
SMALL: dict[str, Any] = {"policy": "ttl", "lookahead": 1, "prefetch_steps": 1}
"""A cache that evicts."""
Losses = list[float]
Loop = Callable[[Ranker, EmbeddingRows | None], Losses]


@contextmanager
def opened(kind: str, folder: Path, **options: Any) -> Iterator[tuple[Any, EmbeddingRows]]:
    """Yield a loader and a source of rows for it, with a store process if it needs one."""
    loader = loader_of(lookups=True)
    options = SMALL | options
    if kind == "processes":
        with running(start_store(folder / "store")) as (store,):
            stores = StoresConfig(
                addresses=(store.address,), token_file=str(folder / "store.token")
            )
            with presage.open_rows(loader, stores, folder / "rows", **options) as rows:
                yield loader, rows
        return
    with presage.open_rows(loader, kind, folder / "rows", **options) as rows:  # type: ignore[arg-type]
        yield loader, rows


def plain_loop(model: Ranker, rows: EmbeddingRows | None) -> Losses:
    """Train every step once."""
    optimizer, losses = optimizer_of(model), []
    for batch in loader_of(lookups=True):
        if rows is not None:
            rows.advance(batch)
        losses.append(train_step(model, optimizer, batch))
    return losses


def odd_loop(model: Ranker, rows: EmbeddingRows | None) -> Losses:
    """Look up more often than once a step, and evaluate between steps and within them."""
    optimizer, losses = optimizer_of(model), []
    evaluation = list(loader_of(split="evaluation", epochs=1, shuffle=False))

    def evaluate() -> None:
        with torch.no_grad():
            losses.extend(model(batch).item() for batch in evaluation)

    for number, batch in enumerate(loader_of(lookups=True)):
        if rows is not None:
            rows.advance(batch)
        model(batch)  # never used
        first, second = model(batch), model(batch)
        if number % 8 == 2:
            evaluate()
        (first + second).backward()
        third = model(batch)  # after an update
        third.backward()
        with torch.no_grad():
            losses.append(model(batch).item())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        if number % 8 == 5:
            evaluate()
        losses += [loss.item() for loss in (first, second, third)]
    return losses


@cache
def run_in_memory(loop: Loop, dim: int = 8) -> tuple[Losses, dict[str, torch.Tensor]]:
    """Return losses and rows of collections without a source."""
    model = Ranker(None, TRANSFORMS["as read"], "adam", dim)
    return loop(model, None), all_rows(model)


def assert_trains_alike(
    model: Ranker, rows: EmbeddingRows, loop: Loop, folder: Path, dim: int = 8
) -> None:
    losses, expected = run_in_memory(loop, dim)
    assert loop(model, rows) == losses
    rows.save(folder / "run", {})
    assert {n: torch.equal(r, expected[n]) for n, r in all_rows(model).items()} == dict.fromkeys(
        expected, True
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "transform"), in_pairs(KINDS, TRANSFORMS))
def test_every_store_trains_as_memory_does(kind: str, transform: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as (_, rows):
        model = Ranker(rows, TRANSFORMS[transform], "adam", 8)
        assert_trains_alike(model, rows, plain_loop, tmp_path)
        if kind != "memory":  # rows left the cache and came back
            assert 500 < rows.fetched_rows < rows.num_accesses


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mmap", pytest.param("processes", marks=pytest.mark.nightly)])
def test_rows_are_current_however_often_they_are_looked_up(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as (_, rows):
        model = Ranker(rows, TRANSFORMS["split"], "adam", 8)
        assert_trains_alike(model, rows, odd_loop, tmp_path)


class PipelinedRanker(Ranker):
    """A model that says itself which batch it computes: the loader is ahead of it."""

    def __init__(self, rows: EmbeddingRows) -> None:
        super().__init__(rows, TRANSFORMS["as read"], "adam", 8)
        self.rows = rows

    def forward(self, batch: Batch) -> Any:
        self.rows.advance(batch)
        loss = super().forward(batch)
        return loss, loss.detach()


@pytest.mark.slow
def test_pipeline_of_torchrec_holds_batches_ahead(tmp_path: Path) -> None:
    with opened("log", tmp_path) as (loader, rows):
        model = PipelinedRanker(rows)
        pipeline: Any = TrainPipelineBase(model, optimizer_of(model), torch.device("cpu"))
        batches, losses = iter(loader), []
        for _ in range(len(loader)):
            losses.append(pipeline.progress(batches).item())
        rows.save(tmp_path / "run", {})
        expected, expected_rows = run_in_memory(plain_loop)
        assert losses == expected
        assert all(torch.equal(r, expected_rows[n]) for n, r in all_rows(model).items())


@pytest.mark.slow
@pytest.mark.parametrize("options", [SMALL, {"policy": "belady", "cache_rows": 233}])
def test_tables_of_two_widths_are_cached_in_mapped_files(
    options: dict[str, Any], tmp_path: Path
) -> None:
    with opened("mmap", tmp_path, **options) as (_, rows):
        model = Ranker(rows, TRANSFORMS["as read"], "adam", 4)
        assert_trains_alike(model, rows, plain_loop, tmp_path, dim=4)
        assert rows.fetched_rows > 259  # rows of the run: some were read twice


@pytest.mark.slow
def test_loop_trains_as_the_trainer_does(tmp_path: Path) -> None:
    layers = "bottom_layers: [16], top_layers: [16], dedup_compute: false"
    job = write_job(tmp_path / "job", model=f"{{{layers}}}", dtype="float32", rows="300")
    run_job(job, small_dataset(), tmp_path / "run", embedding="lru", fast=True)
    config, spec = load_job(job).train, spec_of(open_dataset(small_dataset()), "float32")
    loader = presage.DataLoader.from_job(job, small_dataset(), lookups=True)
    losses: Losses = []
    with presage.open_rows(loader, "log", tmp_path / "rows", **SMALL) as rows:
        tables = [
            EmbeddingBagConfig(
                name=table,
                num_embeddings=min(spec.tables[table].num_rows, 2**63 - 1),
                embedding_dim=config.embedding_dim,
                feature_names=list(features),
                pooling=PoolingType.MEAN,
            )
            for table, features in features_of_tables(spec).items()
        ]
        rule = config.sparse_optimizer
        collection = EmbeddingBagCollection(tables, optimizer=rule, seed=config.seed, source=rows)
        model = build_model(config, spec, collection)
        optimizer = dense_optimizer(config.dense_optimizer, list(model.parameters()))
        for batch in loader:
            rows.advance(batch)
            features = SimpleNamespace(dense=batch.dense_features, sparse=batch.sparse_features)
            loss = loss_of(model(features), batch)  # type: ignore[arg-type]  # labels and weights
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        checkpoint = rows.save(tmp_path / "own", {})
    assert losses == losses_of(tmp_path / "run").tolist()
    expected, found = final_rows(tmp_path / "run"), rows_in(checkpoint)
    assert {n: np.array_equal(found[n], a) for n, a in expected.items()} == dict.fromkeys(
        found, True
    )


def evaluated(model: Ranker) -> Losses:
    with torch.no_grad():
        batches = loader_of(split="evaluation", epochs=1, shuffle=False)
        return [model(batch).item() for batch in batches]


def test_log_is_evaluated_before_the_first_step_and_at_checkpoints(tmp_path: Path) -> None:
    plain = Ranker(None, TRANSFORMS["as read"], "adam", 8)
    with opened("log", tmp_path) as (loader, rows):
        model = Ranker(rows, TRANSFORMS["as read"], "adam", 8)
        assert evaluated(model) == evaluated(plain)
        optimizers = optimizer_of(plain), optimizer_of(model)
        for batch in loader:
            rows.advance(batch)
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                train_step(each, optimizer, batch)
            with torch.no_grad():
                assert model(batch).item() == plain(batch).item()  # rows of the step are cached
            if rows.train_step == 3:
                message = (
                    r"rows of table '\w+' that are in the log can be read in training order only; "
                    r"call rows.save\(...\) before the evaluation, or use store='mmap'"
                )
                with pytest.raises(ValueError, match=f"^{message}$"):
                    evaluated(model)
                rows.save(tmp_path / "run", {})
                assert evaluated(model) == evaluated(plain)
            if rows.train_step == 6:
                break
        rows.save(tmp_path / "run", {})
        assert evaluated(model) == evaluated(plain)


def test_rows_without_a_source_move_to_one(tmp_path: Path) -> None:
    plain = Ranker(None, TRANSFORMS["as read"], "adam", 8)
    optimizer = optimizer_of(plain)
    for _, batch in zip(range(2), loader_of(), strict=False):
        train_step(plain, optimizer, batch)
    with opened("mmap", tmp_path) as (_, rows):
        model = Ranker(rows, TRANSFORMS["as read"], "adam", 8)
        model.load_state_dict(plain.state_dict())
        assert evaluated(model) == evaluated(plain)
        state = model.state_dict()
        assert "tables" not in str(state)  # no row is gathered silently
    message = (
        "state_dict has no rows, which a source held before step 0; make the collection with "
        "source, and call its load before load_state_dict"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        plain.load_state_dict(state)


# ---- Checkpoints ----


@cache
def uninterrupted() -> tuple[dict[int, str], dict[str, torch.Tensor]]:
    """Return the loss of each step and all rows of a run that is not killed."""
    losses, rows = run_in_memory(plain_loop)
    return {step: loss.hex() for step, loss in enumerate(losses)}, rows


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.presage.own_loop", *map(str, arguments)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param("mmap", marks=pytest.mark.nightly), "log", "processes"]
)
def test_killed_loop_resumes_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    arguments: list[str | Path] = [kind, tmp_path]
    losses: dict[int, str] = {}
    starts: list[int] = []
    with running(*[start_store(tmp_path / "s") for _ in range(kind == "processes")]) as stores:
        arguments += [part for s in stores for part in (s.address, tmp_path / "s.token")]
        for killed_at in (7, 23, None):
            process = start(*arguments)
            assert process.stdout is not None
            for number, line in enumerate(process.stdout):
                step, loss = line.split()
                starts += [int(step)] if number == 0 else []
                losses[int(step)] = loss
                if int(step) == killed_at:
                    process.send_signal(signal.SIGKILL)
                    break
            process.stdout.close()
            assert process.wait() == (0 if killed_at is None else -signal.SIGKILL)
    expected, rows = uninterrupted()
    assert losses == expected
    assert starts[0] == 0
    assert starts[1] in (5, 10)  # the loop runs on until the signal arrives
    assert 20 <= starts[2] <= 30
    found = torch.load(tmp_path / "rows.pt", weights_only=True)
    assert {n: torch.equal(r, rows[n]) for n, r in found.items()} == dict.fromkeys(rows, True)


def test_checkpoint_loads_into_every_store(tmp_path: Path) -> None:
    with opened("mmap", tmp_path / "a") as (loader, rows):
        model = Ranker(rows, TRANSFORMS["as read"], "adam", 8)
        optimizer = optimizer_of(model)
        for batch in loader:
            rows.advance(batch)
            train_step(model, optimizer, batch)
            if rows.train_step == 20:
                break
        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        rows.save(tmp_path / "run", {n: part.state_dict() for n, part in parts.items()})
    expected, expected_rows = uninterrupted()
    for kind in ("memory", "log"):
        losses: dict[int, str] = {}
        with opened(kind, tmp_path / kind) as (loader, rows):
            model = train_and_save(
                loader,
                rows,
                tmp_path / "run",
                every=100,
                on_step=lambda step, loss, losses=losses: losses.update({step: loss.hex()}),
            )
            assert losses == {step: expected[step] for step in range(20, 32)}
            if kind == "memory":
                found = all_rows(model)
                assert all(torch.equal(found[n], r) for n, r in expected_rows.items())


# ---- Refusals ----


def batches(count: int) -> list[Batch]:
    return [batch for _, batch in zip(range(count), loader_of(), strict=False)]


def ranker(rows: EmbeddingRows, **tables: Any) -> Ranker:
    return Ranker(rows, TRANSFORMS["as read"], "sgd", tables.get("dim", 8))


def forgotten_advance(rows: EmbeddingRows, folder: Path) -> None:
    ranker(rows)(batches(1)[0])


def advance_once(rows: EmbeddingRows, folder: Path) -> None:
    model, (first, second) = ranker(rows), batches(2)
    rows.advance(first)
    model(first)
    model(second)


def skipped_step(rows: EmbeddingRows, folder: Path) -> None:
    ranker(rows)
    first, _, third = batches(3)
    rows.advance(first)
    rows.advance(first)  # the same step
    rows.advance(third)


def late_backward(rows: EmbeddingRows, folder: Path) -> None:
    model, (first, second) = ranker(rows), batches(2)
    rows.advance(first)
    loss = model(first)
    rows.advance(second)
    loss.backward()


def backward_after_save(rows: EmbeddingRows, folder: Path) -> None:
    model, (first,) = ranker(rows), batches(1)
    rows.advance(first)
    loss = model(first)
    rows.save(folder / "run", {})
    loss.backward()


def late_collection(rows: EmbeddingRows, folder: Path) -> None:
    ranker(rows)
    rows.advance(batches(1)[0])
    ranker(rows)


def same_table(rows: EmbeddingRows, folder: Path) -> None:
    ranker(rows)
    ranker(rows)


def two_widths(rows: EmbeddingRows, folder: Path) -> None:
    ranker(rows, dim=4)
    rows.advance(batches(1)[0])


def feature_of_ones_own(rows: EmbeddingRows, folder: Path) -> None:
    EmbeddingBagCollection([bag_table("page_rows", "crossed")], source=rows)


def features_of_two_tables(rows: EmbeddingRows, folder: Path) -> None:
    EmbeddingBagCollection([bag_table("page_rows", "page", "user")], source=rows)


def late_rows(rows: EmbeddingRows, folder: Path) -> None:
    model = ranker(rows)
    rows.advance(batches(1)[0])
    set_rows(model.bags, "page_rows", torch.arange(2), torch.zeros(2, 8))


def folder_of_another_run(rows: EmbeddingRows, folder: Path) -> None:
    ranker(rows)
    rows.save(folder / "run", {})
    with presage.open_rows(loader_of(), "memory") as others:
        ranker(others)
        others.save(folder / "run", {})


def checkpoint_of_another_width(rows: EmbeddingRows, folder: Path) -> None:
    ranker(rows)
    rows.save(folder / "run", {})
    with presage.open_rows(loader_of(), "memory") as others:
        ranker(others, dim=4)
        others.load(folder / "run")


def state_of_unknown_classes(rows: EmbeddingRows, folder: Path) -> None:
    ranker(rows)
    rows.save(folder / "run", {"clock": SimpleNamespace()})


def small_cache(rows: EmbeddingRows, folder: Path) -> None:
    with presage.open_rows(loader_of(), "mmap", folder / "small", cache_rows=60) as small:
        ranker(small)
        small.advance(batches(1)[0])


def other_order(rows: EmbeddingRows, folder: Path) -> None:
    with presage.open_rows(loader_of(seed=6), "mmap", folder / "other") as others:
        ranker(others)
        others.advance(batches(1)[0])


REFUSED: dict[Callable[[EmbeddingRows, Path], None], tuple[type[Exception], str]] = {
    forgotten_advance: (
        ValueError,
        r"rows are looked up for training before a step is begun; call rows\.advance\(batch\) for "
        r"each batch, or look up without gradients",
    ),
    advance_once: (
        SchemaError,
        r"plan of step 0 lacks \d+ rows of table '\w+' that are looked up, the first is \d+; call "
        r"rows\.advance\(batch\) for each batch, and look up other ids without gradients",
    ),
    skipped_step: (
        ValueError,
        r"batch is of step 2, but the rows are at step 1; advance by each training batch once, and "
        r"load loader and rows from the same checkpoint",
    ),
    late_backward: (
        ValueError,
        r"backward pass reaches rows of a step that has ended; call backward, and step of a "
        r"RowOptimizer, before rows\.advance\(batch\) of the next batch and before rows\.save",
    ),
    backward_after_save: (ValueError, "backward pass reaches rows of a step that has ended"),
    late_collection: (
        ValueError,
        r"collections were made after rows were read: user_rows, page_rows; make all "
        r"collections of the source first",
    ),
    same_table: (
        ValueError,
        r"table names must be unique among the collections of a source, got 'user_rows' twice; "
        r"rename one",
    ),
    two_widths: (
        ValueError,
        r"rows of the log and of store processes must have one width and type, got .*; make a "
        r"source of each, in its own directory",
    ),
    feature_of_ones_own: (
        ValueError,
        r"features of table 'page_rows' must be in the tables of the dataset's job, got 'crossed'; "
        r"make its collection without source",
    ),
    features_of_two_tables: (
        ValueError,
        r"features of table 'page_rows' must be of one table of the dataset's job, got pages, "
        r"users; make a table of each, since rows are planned by table",
    ),
    late_rows: (
        ValueError,
        r"rows of table 'page_rows' are set after the first step, or in the log; set them before "
        r"it, in another store",
    ),
    folder_of_another_run: (SchemaError, "folder has checkpoints of another run"),
    checkpoint_of_another_width: (
        SchemaError,
        r"tables\.page_rows\.dim differs from that of the checkpoint: 4 instead of 8",
    ),
    state_of_unknown_classes: (UnpicklingError, "types.SimpleNamespace"),
    small_cache: (
        PlanError,
        r"cache is too small for .*: cache_rows=60; use at least \d+, .*",
    ),
    other_order: (SchemaError, r"dataset has no index for .*, seed=6, closest: seed=5"),
}


@pytest.mark.parametrize("misuse", REFUSED, ids=lambda misuse: misuse.__name__)
def test_source_refuses_by_name(
    misuse: Callable[[EmbeddingRows, Path], None], tmp_path: Path
) -> None:
    kind, (error, message) = "log", REFUSED[misuse]
    with opened(kind, tmp_path) as (_, rows), pytest.raises(error) as refused:
        misuse(rows, tmp_path)
    assert re.search(message, str(refused.value)), str(refused.value)


def test_loader_of_other_batches_is_refused(tmp_path: Path) -> None:
    evaluation = loader_of(split="evaluation", epochs=1, shuffle=False)
    for loader in (evaluation, loader_of(world_size=2), loader_of(follow=True)):
        with pytest.raises(ValueError, match=r"^rows are planned for a loader of the train split"):
            presage.open_rows(loader, "mmap", tmp_path)
    with pytest.raises(ValueError, match=r"^directory is missing, which store='mmap' needs"):
        presage.open_rows(loader_of())


@pytest.mark.parametrize("kind", ["mmap", "log"])
def test_directory_of_rows_that_are_in_use_is_refused_until_they_are_closed(
    kind: str, tmp_path: Path
) -> None:
    with opened(kind, tmp_path) as (loader, rows), opened(kind, tmp_path) as (_, second):
        model, other = (Ranker(each, TRANSFORMS["as read"], "adam", 8) for each in (rows, second))
        batch = next(iter(loader))
        rows.advance(batch)
        for _ in range(2):
            with pytest.raises(SchemaError, match=r"^directory of rows is in use: pid \d+ on \S+ "):
                second.advance(batch)
        model(batch)
        rows.close()
        second.advance(batch)
        other(batch)
