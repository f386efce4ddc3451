"""Look-ups of all tables at once, against those of one table after the other."""

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from schemas.config.train import ModelConfig
from tests.trainer.elsewhere import DEVICE, OnElsewhere, there
from trainer.data.collate import Batch, batch_from_kjt, move_batch
from trainer.embedding.device import DeviceLookups
from trainer.embedding.kernels.interface import ArenaRows
from trainer.embedding.module import MicrobatchLookups

DIM, NUM_SAMPLES = 3, 7


def draw_batch(num_features: int, seed: int, *, grouped: bool, weighted: bool) -> Batch:
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


def draw_rows(batch: Batch, seed: int) -> dict[str, torch.Tensor]:
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
    arenas = {table: ArenaRows(values, values[:, :0]) for table, values in rows.items()}
    one = MicrobatchLookups(batch, arenas, None, mean=mean)
    with OnElsewhere():
        moved = move_batch(batch, ModelConfig(), DEVICE)
        both = DeviceLookups(moved, there(torch.cat(list(rows.values()))), mean=mean)
        assert both.keys == one.keys
        expected, found = one.pool(), both.pool()
        factor = torch.rand_like(expected)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-12)
        loss, there_loss = (expected * factor).sum(), (found * there(factor)).sum()
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
    arenas = {table: ArenaRows(values, values[:, :0]) for table, values in rows.items()}
    one = MicrobatchLookups(batch, arenas, None, mean=True)
    with OnElsewhere():
        moved = move_batch(batch, ModelConfig(), DEVICE)
        both = DeviceLookups(moved, there(torch.cat(list(rows.values()))), mean=True)
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
        with OnElsewhere() as mode:
            moved = move_batch(batch, ModelConfig(), DEVICE)
            mode.calls.clear()
            lookups = DeviceLookups(moved, there(values), mean=True)
            lookups.pool().sum().backward()
            lookups.sum_gradients()
        views = {"view", "slice", "detach", "alias", "expand", "unsqueeze", "squeeze", "select"}
        calls.append({name: n for name, n in mode.calls.items() if name not in views})
    assert calls[0] == calls[1]
    assert calls[0]["_embedding_bag_forward_only"] == 2
