"""Hashes are pinned: bytes written today mean the same in any later release."""

import re

import numpy as np
import pytest

from schemas.errors import SchemaError
from schemas.hashing import MAX_ROW, NUM_SLOTS, hash_rows, salt_of, slot_of_row, splitmix64
from schemas.job import TableConfig
from schemas.rows import rows_of_ids

IDS = np.array([0, 1, 2, 3, -1, 7, 10**6, 2**63 - 1, -(2**63), 123456789])


def test_splitmix64_of_a_sequence_equals_the_published_outputs() -> None:
    """The generator seeded with 1234567, as published with other implementations."""
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    states = [(1234567 + n * golden) & mask for n in range(5)]
    assert splitmix64(np.array(states, np.uint64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_splitmix64_equals_ten_pinned_numbers() -> None:
    values = np.array([0, 1, 2, 3, -1, -2, 2**62, 10**6, 42, 2**63 - 1])
    assert [hex(int(value)) for value in splitmix64(values)] == [
        "0xe220a8397b1dcdaf",
        "0x910a2dec89025cc1",
        "0x975835de1c9756ce",
        "0x1d0b14e4db018fed",
        "0xe4d971771b652c20",
        "0xf3203e9039f4a821",
        "0xaa50ea8e0fa9eb",
        "0x680d1cce9cff45e7",
        "0xbdd732262feb6e95",
        "0x2a67d7552e039ea7",
    ]


def test_hash_rows_equals_ten_pinned_numbers() -> None:
    assert hash_rows(IDS, "items", 1000).tolist() == [
        *(399, 694, 60, 913, 722, 576, 713, 482, 973, 966)
    ]
    assert hash_rows(IDS, "users", 1000).tolist() == [
        *(974, 414, 424, 97, 182, 255, 816, 570, 637, 294)
    ]


def test_hash_rows_of_the_widest_table_keeps_63_bits() -> None:
    rows = hash_rows(IDS, "items", MAX_ROW + 1)
    assert rows[:2].tolist() == [3716881230976522399, 7000372475974396694]
    mixed = splitmix64(IDS.view(np.uint64) ^ salt_of("items"))
    assert rows.tolist() == [int(value) % (1 << 63) for value in mixed]


def test_slot_of_row_equals_ten_pinned_numbers() -> None:
    rows = np.array([0, 1, 2, 3, 4, 5, 1000, 10**6, 2**62, 2**63 - 1])
    assert slot_of_row(rows).tolist() == [*(3618, 2320, 2421, 464, 1767, 1584, 961, 1664, 10, 678)]


def test_hash_rows_takes_signed_and_unsigned_ids_by_their_bits() -> None:
    np.testing.assert_array_equal(
        hash_rows(IDS, "items", 10**9), hash_rows(IDS.view(np.uint64), "items", 10**9)
    )


def test_splitmix64_keeps_the_shape_and_its_input() -> None:
    values = np.arange(6).reshape(2, 3)
    values.flags.writeable = False
    assert splitmix64(values).shape == (2, 3)
    assert splitmix64(np.int64(1)).shape == ()
    assert int(splitmix64(np.int64(1))) == 0x910A2DEC89025CC1


def test_splitmix64_is_one_to_one_and_spreads_neighbours_evenly() -> None:
    values = np.arange(NUM_SLOTS * 100)
    assert len(np.unique(splitmix64(values))) == len(values)
    per_slot = np.bincount(slot_of_row(values), minlength=NUM_SLOTS)
    # 4,096 slots with 100 rows each on average: chi-square stays within 6 standard deviations.
    chi_square = float(((per_slot - 100.0) ** 2 / 100.0).sum())
    assert abs(chi_square - NUM_SLOTS) < 6 * np.sqrt(2 * NUM_SLOTS)


def table(num_rows: int, rows: str) -> TableConfig:
    return TableConfig(features=("f",), num_rows=num_rows, rows=rows)  # type: ignore[arg-type]


def test_rows_of_ids_hashes_or_keeps_the_id() -> None:
    ids = np.array([0, 9, 4], np.int32)
    assert rows_of_ids(ids, "t", table(10, "identity")).tolist() == [0, 9, 4]
    np.testing.assert_array_equal(rows_of_ids(ids, "t", table(10, "hash")), hash_rows(ids, "t", 10))


@pytest.mark.parametrize("bad", [-1, 10, -(2**63)])
def test_rows_of_ids_outside_an_identity_table_raises(bad: int) -> None:
    message = (
        f"id must be in [0, 10) for table 't', got {bad}; "
        "reject it when the dataset is built, or use rows: hash"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        rows_of_ids(np.array([3, bad]), "t", table(10, "identity"))
