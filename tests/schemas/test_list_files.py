"""Lists over several files equal the concatenated lists in any order of access."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from presage.schemas.arrays import Jagged, offsets_of
from presage.schemas.dataset.checked_files import CheckedFile, DecodedListCache, ListFiles


@dataclass
class InMemory:
    """A file of lists, one row group or more, that counts how often it decodes one."""

    row_groups: list[list[list[int]]]
    decoded: int = 0

    @property
    def rows_per_row_group(self) -> list[int]:
        return [len(lists) for lists in self.row_groups]

    def prefetch(self, row_group: int) -> None:
        """Nothing is at a store."""

    def prefetch_footer(self) -> None:
        """Nothing is at a store."""

    def close(self) -> None:
        """Nothing is mapped."""


def decode(file: Any, row_group: int) -> Jagged:
    file.decoded += 1
    lists = file.row_groups[row_group]
    flat = np.array([value for values in lists for value in values], np.int64)
    return Jagged(flat, offsets_of(np.array(list(map(len, lists)), np.int64)))


def opened(files: list[InMemory], kept: DecodedListCache | None = None) -> ListFiles:
    return ListFiles(cast("list[CheckedFile]", files), decode, kept)


FILES = [[[[1, 2], []]], [[]], [[[7], [8, 9, 10]], [[11]]], [[[]]]]


@pytest.mark.parametrize("most_bytes", [0, 24, 1_000])
def test_lists_in_any_order_are_those_of_the_whole(most_bytes: int) -> None:
    expected = [values for file in FILES for lists in file for values in lists]
    lists = opened([InMemory(file) for file in FILES], DecodedListCache(most_bytes))
    assert len(lists) == 6
    for index in np.random.default_rng(0).integers(0, 6, 60).tolist():
        assert lists[index].tolist() == expected[index]


@pytest.mark.parametrize("backwards", [False, True])
def test_in_order_each_row_group_is_decoded_once_without_any_allowance(backwards: bool) -> None:
    files = [InMemory(file) for file in FILES]
    lists = opened(files, DecodedListCache(0))
    for index in range(6)[:: -1 if backwards else 1]:
        lists[index]
    assert [file.decoded for file in files] == [1, 0, 2, 1]


def test_allowance_is_shared_and_those_that_were_used_longest_ago_go() -> None:
    one, other = ([InMemory([[[1, 2]]]), InMemory([[[3, 4]]])] for _ in range(2))
    kept = DecodedListCache(3 * 16)
    a, b = opened(one, kept), opened(other, kept)
    for lists, index in ((a, 0), (a, 1), (b, 0), (a, 0), (b, 1), (b, 0), (a, 0), (a, 1)):
        assert len(lists[index]) == 2
    assert [file.decoded for file in one] == [1, 2]
    assert [file.decoded for file in other] == [1, 1]
