"""The map from rows to slots equals a dictionary."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.trainer.slots.slot_map import SlotMap

SIZES = [3, 0, 40, 1]


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[list[int], dict[int, int]]]:
    """Draw slots that are freed, then slots that get rows, as a plan does."""
    starts = np.cumsum([0, *SIZES])
    held: dict[int, int] = {}
    steps: list[tuple[list[int], dict[int, int]]] = []
    for _ in range(draw(st.integers(1, 8))):
        freed = draw(st.lists(st.sampled_from(sorted(held)), unique=True)) if held else []
        for slot in freed:
            del held[slot]
        added: dict[int, int] = {}
        free = [slot for slot in range(starts[-1]) if slot not in held]
        for slot in draw(st.lists(st.sampled_from(free), unique=True)) if free else []:
            table = int(np.searchsorted(starts, slot, side="right")) - 1
            of_table = {r for s, r in held.items() if starts[table] <= s < starts[table + 1]}
            # few rows of each hash, so that entries have to move
            row = draw(st.sampled_from([*range(60), (1 << 63) - 1]))
            if row not in of_table:
                held[slot] = added[slot] = row
        steps.append((freed, added))
    return steps


@given(steps=changes())
def test_slot_map_is_a_dictionary(steps: list[tuple[list[int], dict[int, int]]]) -> None:
    starts = np.cumsum([0, *SIZES])
    slots, held = SlotMap(starts), dict[tuple[int, int], int]()
    for freed, added in steps:
        slots.remove(np.array(freed, np.int32))
        held = {key: slot for key, slot in held.items() if slot not in freed}
        slots.add(np.array([*added], np.int32), np.array([*added.values()], np.int64))
        for slot, row in added.items():
            held[int(np.searchsorted(starts, slot, side="right")) - 1, row] = slot
        for table in range(len(SIZES)):
            rows = [row for t, row in held if t == table]
            values = np.array([*rows, 77, -5], np.int64)
            offsets, tables = np.array([0, 1, len(values)]), np.array([-1, table])
            found, missing = slots.find(values, offsets, tables)
            wanted = [held[table, row] - starts[table] for row in rows[1:]]
            assert found[1 : len(rows)].tolist() == wanted
            assert found[0] == values[0], "features without a table are copied"
            assert missing == max(1, len(rows))


def test_wrong_slots_are_refused() -> None:
    slots = SlotMap(np.array([0, 4]))
    slots.add(np.array([2], np.int32), np.array([7]))
    with pytest.raises(ValueError, match="slots must be free"):
        slots.add(np.array([2], np.int32), np.array([8]))
    with pytest.raises(ValueError, match="slots must hold a row"):
        slots.remove(np.array([1], np.int32))
    with pytest.raises(ValueError, match="row numbers must be in range"):
        slots.remove(np.array([4], np.int32))
