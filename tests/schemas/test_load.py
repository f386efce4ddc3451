"""Load of a table against a scan of its accesses, over random orders of several epochs."""

import numpy as np
import pytest

from presage.schemas.arrays import Jagged, offsets_of
from presage.schemas.config.job import OrderConfig
from presage.schemas.dataset.accesses import REUSE_BINS, count_distances, slot_accesses
from presage.schemas.dataset.order import Order
from presage.schemas.hashing import slot_of_row
from presage.schemas.oracle.next_uses import next_use
from tests.schemas import reference
from tests.schemas.tiny import merge_blocks
from tests.shared import in_pairs


@pytest.mark.parametrize(
    ("seed", "epochs", "shuffle"), in_pairs(range(6), [1, 2, 5], ["none", "blocks"])
)
def test_load_equals_a_scan_and_epochs_link_until_the_last(
    seed: int, epochs: int, shuffle: str
) -> None:
    rng = np.random.default_rng([seed, epochs])
    lists = [np.flatnonzero(rng.random(12) < 0.4) for _ in range(rng.integers(1, 9))]
    blocks = Jagged(np.concatenate(lists), offsets_of(np.array([len(a) for a in lists])))
    config = OrderConfig(shuffle="blocks" if shuffle == "blocks" else "none", seed=seed)
    order = Order((len(lists),), int(rng.integers(1, 4)), epochs, config)
    entries = [merge_blocks(blocks, order.step(s).positions) for s in range(order.num_steps)]
    distances = next_use(entries, 12)
    assert [d.tolist() for d in distances] == reference.next_use([e.tolist() for e in entries])
    per_epoch = order.num_steps // epochs
    for train_step, found in enumerate(distances):  # a row comes back in every epoch but the last
        assert (found > 0).all() or train_step >= order.num_steps - per_epoch

    rows = rng.integers(0, 2**60, 12)
    periods = min(3, order.num_steps)
    slots = np.zeros((periods, 4), int)
    reuse, never = np.zeros(REUSE_BINS, int), 0
    for train_step, (numbers, found) in enumerate(zip(entries, distances, strict=True)):
        for number, distance in zip(numbers.tolist(), found.tolist(), strict=True):
            slot = int(slot_of_row(rows[number : number + 1])[0])
            slots[train_step * periods // order.num_steps, slot // 1024] += 1
            if distance:
                reuse[distance.bit_length() - 1] += 1
            never += not distance
    assert np.array_equal(slot_accesses(entries, rows, order.num_steps, 3, 4), slots)
    counts, num_never = count_distances(distances)
    assert np.array_equal(counts, reuse)
    assert num_never == never


def test_load_of_a_table_that_nothing_looks_into_is_even() -> None:
    assert not slot_accesses([], np.empty(0, np.int64), 0).any()
    reuse, never = count_distances([])
    assert (never, reuse.sum()) == (0, 0)
