"""Hashes are pinned: they must not change in any release."""

import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.schemas.config.job import TableConfig
from presage.schemas.errors import SchemaError
from presage.schemas.hashing import NUM_SLOTS, hash_rows, slot_of_row, splitmix64
from presage.schemas.rows import ids_of, rows_of_ids, rows_of_values
from tests.schemas.reference import hash_text

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


def test_hash_rows_equals_ten_pinned_numbers() -> None:
    assert hash_rows(IDS, "items", 1000).tolist() == [
        *(399, 694, 60, 913, 722, 576, 713, 482, 973, 966)
    ]
    assert hash_rows(IDS, "users", 1000).tolist() == [
        *(974, 414, 424, 97, 182, 255, 816, 570, 637, 294)
    ]


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


@given(st.lists(st.text(max_size=90)))
def test_ids_of_texts_equal_the_reference_however_they_lie(texts: list[str]) -> None:
    expected = [hash_text(text) for text in texts]
    whole = pa.array(["x", *texts, "y"], pa.large_string())
    for values in (whole, whole.cast(pa.string()), whole.dictionary_encode()):
        assert ids_of(values.slice(1, len(texts))).tolist() == expected
    rows = rows_of_values(whole.slice(1, len(texts)), "t", table(1000, "hash"))
    assert rows.tolist() == hash_rows(np.array(expected, np.int64), "t", 1000).tolist()


def test_ids_of_many_and_long_texts_equal_the_reference() -> None:
    texts = [f"user-{n}@example.org" for n in range(2000)]
    texts += [chr(65 + n % 60) * n for n in range(200)]
    assert sum(map(len, texts)) > 1 << 15  # enough for the table of bytes
    assert ids_of(pa.array(texts)).tolist() == [hash_text(text) for text in texts]


PINNED_TEXTS = [
    -2152535657050944081,
    6292077030810485607,
    -5585002977199488040,
    -3854042809136947542,
    3629182871631954834,
    7459835301119815770,
    -4679461696494408120,
    -4623940363744051336,
    3803495356858415645,
    -9174263829551627900,
]


def test_ids_of_texts_equal_ten_pinned_numbers() -> None:
    texts = ["", "a", "b", "ab", "ba", "N55189", "\N{SNOWMAN}", "\0", "0", "x" * 100]
    assert ids_of(pa.array(texts)).tolist() == PINNED_TEXTS


def test_ids_of_numbered_texts_have_no_collision_and_fill_a_table_evenly() -> None:
    ids = ids_of(pa.array([f"N{number}" for number in range(200_000)]))
    assert len(np.unique(ids)) == 200_000
    counts = np.bincount(hash_rows(ids, "t", 1000), minlength=1000)
    assert float(((counts - 200.0) ** 2 / 200.0).sum()) < 1000 + 6 * np.sqrt(2 * 1000)


def test_texts_of_an_identity_table_are_refused() -> None:
    message = "ids of table 't' must be integers, got texts; use rows: hash, or a vocabulary"
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        rows_of_values(pa.array(["a"]), "t", table(10, "identity"))


@pytest.mark.parametrize("bad", [-1, 10, -(2**63)])
def test_rows_of_ids_outside_an_identity_table_raises(bad: int) -> None:
    message = (
        f"id must be in [0, 10) for table 't', got {bad}; "
        "reject it when the dataset is built, or use rows: hash"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        rows_of_ids(np.array([3, bad]), "t", table(10, "identity"))
