"""Which rows of a batch the steps around it use: equal to a search through all batches."""

from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.distributed.pec_collision_handlers import BooleanOverlapChecker

import presage
from presage.batch import Batch
from presage.schemas.errors import SchemaError
from tests.presage.test_loader import ORDER, Workers, loader, state_after_steps
from tests.shared import make_once
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import SEGMENTS

TABLES = {"users": ["user"], "items": ["clicked", "item", "viewed"], "pages": ["page"]}
TABLE_OF = {feature: table for table, features in TABLES.items() for feature in features}
RowsOfStep = dict[str, set[int]]
"""By table."""
ORDERS: list[dict[str, Any]] = [
    {"batch_samples": 64, "epochs": 1, "shuffle": False, "seed": 5},
    {"batch_samples": 32, "epochs": 3, "shuffle": False, "seed": 5},
    {"batch_samples": 16, "epochs": 2, "shuffle": True, "seed": 5},
    {"batch_samples": 64, "epochs": 3, "shuffle": True, "seed": 5},
]


def _dataset_of(folder: Path, batch_samples: int, epochs: int, shuffle: str) -> None:
    changes = {"planned": str(batch_samples), "epochs": str(epochs), "shuffle": shuffle}
    make_dataset(folder / "dataset", write_job(folder / "job", **changes), SEGMENTS)


def dataset_of(order: dict[str, Any]) -> Path:
    """Return a dataset that has the index of an order."""
    shuffle = "blocks" if order["shuffle"] else "none"
    return make_once(_dataset_of, order["batch_samples"], order["epochs"], shuffle) / "dataset"


def ranges_of(batch: Batch) -> dict[str, slice]:
    """Return the range of each feature in the values of a batch."""
    sparse = batch.sparse_features
    ranges = map(slice, sparse.offset_per_key()[:-1], sparse.offset_per_key()[1:])
    return dict(zip(sparse.keys(), ranges, strict=True))


def rows_of(batch: Batch) -> RowsOfStep:
    rows: RowsOfStep = {table: set() for table in TABLES}
    for feature, values in ranges_of(batch).items():
        rows[TABLE_OF[feature]].update(batch.sparse_features.values()[values].tolist())
    return rows


@cache
def rows_per_step(number: int) -> list[RowsOfStep]:
    """Return the rows of each global batch of an order of `ORDERS`."""
    return [rows_of(b) for b in presage.DataLoader(dataset_of(ORDERS[number]), **ORDERS[number])]


def expected(batch: Batch, others: list[RowsOfStep]) -> torch.Tensor:
    """Return which values of a batch are rows of some of other steps."""
    values, found = batch.sparse_features.values().tolist(), list[bool]()
    for feature, own in ranges_of(batch).items():
        rows = set[int]().union(*(step[TABLE_OF[feature]] for step in others))
        found += [row in rows for row in values[own]]
    return torch.tensor(found, dtype=torch.bool)


def check(batch: Batch, steps: list[RowsOfStep], train_step: int, k: int) -> tuple[int, int]:
    """Compare the masks of a batch; return how many values overlap, and how many do not."""
    following = expected(batch, steps[train_step + 1 : train_step + 1 + k])
    previous = expected(batch, steps[max(0, train_step - k) : train_step])
    assert batch.overlaps_next is not None
    assert batch.overlaps_previous is not None
    assert torch.equal(batch.overlaps_next, following), train_step
    assert torch.equal(batch.overlaps_previous, previous), train_step
    both = torch.stack([following, previous])
    return int(both.sum()), int((~both).sum())


@pytest.mark.slow
@pytest.mark.parametrize("case", range(8))
def test_masks_are_those_of_a_search_through_all_batches(case: int) -> None:
    rng = np.random.default_rng(case)
    number, k = case % len(ORDERS), int(rng.choice([1, 1, 2, 3, 7, 1000]))
    steps, world_size = rows_per_step(number), int(rng.integers(1, 6))
    start = int(rng.integers(len(steps))) if case % 3 else 0
    options = {"world_size": world_size, "deduplicated": bool(rng.integers(2))}
    options |= {"equal_batches": bool(rng.integers(2)), "lookups": bool(rng.integers(2))}
    counts = np.zeros(2, np.int64)
    for rank in range(world_size):
        running = presage.DataLoader(
            dataset_of(ORDERS[number]), overlap_steps=k, rank=rank, **ORDERS[number], **options
        )
        running.load_state_dict(running.state_at(start))
        batches = list(running)
        assert len(batches) == len(steps) - start
        for train_step, batch in enumerate(batches, start):
            counts += check(batch, steps, train_step, k)
        check(running.first_batch(), steps, 0, k)
    assert counts.all()


@pytest.mark.parametrize("num_workers", [2, 3])
def test_worker_processes_mark_the_rows_of_all_steps(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = ORDERS.index({**ORDER, "epochs": 3})
    steps, order = rows_per_step(number), ORDERS[number]
    running = presage.DataLoader(dataset_of(order), overlap_steps=2, **order)
    running.load_state_dict(running.state_at(13))
    workers = Workers(running, num_workers)
    workers.start(monkeypatch)
    batches = workers.take(999)
    assert len(batches) == len(steps) - 13
    for train_step, batch in enumerate(batches, 13):
        check(batch, steps, train_step, 2)


def test_masks_are_those_of_torchrec() -> None:
    features = [*TABLES["pages"], *TABLES["items"], "price"]
    checker = BooleanOverlapChecker(torch.device("cpu"), mask_size=12 + 300)

    def remapped(batch: Batch) -> torch.Tensor:
        values = batch.sparse_features.values().clone()
        values[ranges_of(batch)["page"]] += 300
        return values

    for previous, batch in pairwise(loader(features=features, overlap_steps=1)):
        forward, backward = checker.check(remapped(batch), remapped(previous))
        assert batch.overlaps_previous is not None
        assert previous.overlaps_next is not None
        assert torch.equal(batch.overlaps_previous, forward)
        assert torch.equal(previous.overlaps_next, backward)


def test_features_that_are_not_read_count_as_uses_of_their_table() -> None:
    few = loader(features=["item", "price"], overlap_steps=1)
    for some, whole in zip(few, loader(overlap_steps=1), strict=True):
        own = ranges_of(whole)["item"]
        for name in ("overlaps_next", "overlaps_previous"):
            assert torch.equal(getattr(some, name), getattr(whole, name)[own])


def test_batches_have_no_masks_unless_they_are_requested() -> None:
    batch = loader().first_batch()
    assert batch.overlaps_next is batch.overlaps_previous is None
    assert "overlaps" not in repr(batch)
    assert batch.to("meta").overlaps_next is None
    assert "overlaps_previous" in repr(loader(overlap_steps=1).first_batch())


def test_state_is_that_of_a_loader_without_masks() -> None:
    resumed = loader(overlap_steps=3)
    resumed.load_state_dict(state_after_steps(20))
    (batch,) = islice(resumed, 1)
    assert (batch.epoch, batch.step) == (1, 4)


def test_orders_without_an_index_and_other_splits_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"no index for .*seed=6.*; run .* oracle .*--reindex"):
        loader(overlap_steps=1, seed=6)
    message = "^overlap_steps needs the index of a loader of the train split without follow, got "
    with pytest.raises(ValueError, match=f"{message}split='train', follow=True; leave it out$"):
        loader(overlap_steps=1, follow=True)
    evaluation: dict[str, Any] = {"split": "evaluation", "epochs": 1, "shuffle": False}
    with pytest.raises(ValueError, match=f"{message}split='evaluation'"):
        loader(overlap_steps=1, **evaluation)
    with pytest.raises(ValueError, match="overlap_steps must be at least 0, got -1"):
        loader(overlap_steps=-1)
