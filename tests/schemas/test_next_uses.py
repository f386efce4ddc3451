"""Next uses over any selection of segments equal those of the concatenated steps."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from operator import ge
from pathlib import Path

import numpy as np
import pytest

from presage.schemas.arrays import Jagged
from presage.schemas.config.train import CacheConfig
from presage.schemas.dataset import accesses
from presage.schemas.dataset.accesses import TableAccesses, num_unique_rows
from presage.schemas.dataset.checked_files import CheckedFile
from presage.schemas.dataset.opened import OpenDataset, select_segments, step_distances
from presage.schemas.dataset.run_next_uses import NextUses, indexed_steps, next_steps
from presage.schemas.errors import SchemaError
from presage.schemas.oracle.cache_plan import required_rows
from presage.schemas.oracle.reuse import next_bound, peak_cache_rows
from tests.schemas import reference
from tests.schemas.parts import write_lists
from tests.shared import in_pairs

Decode = Callable[[CheckedFile, int], Jagged]


def random_segments(rng: np.random.Generator, num_segments: int) -> list[list[np.ndarray] | None]:
    """Blocks of a few rows of 40, some without a row; one segment in eight lacks the table."""
    segments: list[list[np.ndarray] | None] = []
    for _ in range(num_segments):
        blocks = [rng.integers(0, 40, rng.integers(0, 9)) for _ in range(rng.integers(0, 8))]
        segments.append([np.unique(rows) for rows in blocks] if rng.random() < 0.9 else None)
    return segments


def rows_of_steps(dataset: OpenDataset, segments: list[list[np.ndarray] | None]) -> list[list[int]]:
    """The ascending rows of each step of the run, by the segments' lists alone."""
    (entry,) = dataset.manifest.indexes
    order = dataset.order(entry.batch_samples, entry.epochs, entry.shuffle, entry.seed)
    chosen = [segments[int(s.id.split("-")[0])] or [] for s in dataset.segments]
    steps = map(order.step, range(order.num_steps))
    blocks = ([chosen[s.segment][p].tolist() for p in s.positions.tolist()] for s in steps)
    return [sorted({row for rows in step for row in rows}) for step in blocks]


def check(dataset: OpenDataset, segments: list[list[np.ndarray] | None]) -> None:
    """Compare every step of a run with the next uses in its list of steps."""
    index = dataset.open_index(dataset.manifest.indexes[0])
    accessed = TableAccesses(dataset, "items", index.order)
    next_uses = NextUses(dataset, index, "items", accessed.numbering)
    steps = rows_of_steps(dataset, segments)
    expected = reference.next_use(steps)
    found = list(indexed_steps(dataset, index, "items"))
    assert len(found) == len(next_uses) == len(steps)
    for (numbers, distances), rows, later in zip(found, steps, expected, strict=True):
        assert (np.diff(numbers) > 0).all()
        of_row = dict(zip(accessed.rows[numbers].tolist(), distances.tolist(), strict=True))
        assert of_row == dict(zip(rows, later, strict=True))
    assert index.num_accesses("items") == sum(map(len, steps))
    assert num_unique_rows(dataset, "items") == len(set().union(*steps))
    ends = {index.order.num_steps, index.order.first_step(len(dataset.segments) - 1)}
    for end in sorted(ends):
        known = [[d if s + d < end else 0 for d in x] for s, x in enumerate(expected[:end])]
        check_reuse(next_uses, known)
    check_last_uses(next_uses, expected)
    for first in (0, *range(1, len(steps), 2), len(steps)):
        for end in ends:
            later = enumerate(steps[first:end], start=first)
            first_of = {row: step for step, rows in reversed(list(later)) for row in rows}
            found = next_steps(dataset, index, "items", accessed.numbering, max(0, first), end)
            assert found.tolist() == [first_of.get(row, -1) for row in accessed.rows.tolist()]
    at_random = np.random.default_rng(1).permutation(len(steps))[:5].tolist()
    assert all(np.array_equal(next_uses[t], list(next_uses)[t]) for t in at_random)


def check_reuse(next_uses: NextUses, distances: list[list[int]]) -> None:
    """Compare the reuse of a run's first steps with that of its next-use distances."""
    end = len(distances)
    flat = [np.array(step, np.int32) for step in distances]
    for distance, prefetch in ((1, 1), (5, 2), (9, 9), (1000, 1)):
        reuse, bound = next_uses.reuse(distance, end), next_bound(distance)
        again = [[step + d for d in x if 0 < d <= bound] for step, x in enumerate(distances)]
        assert reuse.num_rows.tolist() == list(map(len, distances))
        assert reuse.kept.tolist() == list(map(len, again))
        times = Counter(step for steps in again for step in steps)
        assert reuse.returning.tolist() == [times[step] for step in range(end)]
        cache = CacheConfig(lookahead=bound, prefetch_steps=prefetch)
        assert peak_cache_rows(reuse, prefetch) == required_rows([flat], cache)


def check_last_uses(next_uses: NextUses, distances: list[list[int]]) -> None:
    """Compare the last uses before multiples with those by next-use distances."""
    for every in (1, 3, 5, 7, 40):
        last = [
            sum(not d or step // every < (step + d) // every for d in x)
            for step, x in enumerate(distances)
        ]
        bounds = next_uses.last_uses(every).tolist()
        assert bounds == last if every <= 5 else all(map(ge, bounds, last))


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "shuffle"), in_pairs([1, 2, 3], ["none", "blocks"]))
def test_next_uses_equal_those_of_the_concatenated_steps(
    tmp_path: Path, epochs: int, shuffle: str
) -> None:
    rng = np.random.default_rng(epochs)
    for num_segments in (1, 2, 3, 5):
        segments = random_segments(rng, num_segments)
        keys = {0: 2**64 - 1} if num_segments == 3 else {}
        settings = (16 * int(rng.integers(1, 4)), epochs, shuffle, 7)
        dataset = write_lists(tmp_path / str(num_segments), segments, settings, keys)
        check(dataset, segments)
        for _ in range(3):
            names = [s.id for s in dataset.segments if rng.random() < 0.6]
            if names:
                check(select_segments(dataset, names), segments)


def test_next_uses_in_a_temporary_file_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = random_segments(np.random.default_rng(5), 4)
    dataset = write_lists(tmp_path / "dataset", segments, (32, 2, "none", 0))
    monkeypatch.setattr("presage.schemas.dataset.run_next_uses.HEAP_BYTES", 0)
    check(dataset, segments)


def test_accesses_and_next_uses_keep_one_decoded_row_group_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = [[np.array([3, 5]), np.array([5])], [np.array([3])], [np.array([4, 5])]]
    dataset = write_lists(tmp_path / "dataset", segments, (16, 2, "none", 0))
    decoded = list[weakref.ref[np.ndarray]]()

    def remember(decode: Decode) -> Decode:
        def decode_and_remember(file: CheckedFile, row_group: int) -> Jagged:
            lists = decode(file, row_group)
            decoded.append(weakref.ref(lists.values))
            return lists

        return decode_and_remember

    monkeypatch.setattr("presage.schemas.dataset.run_next_uses.DECODED_CACHE_BYTES", 0)
    monkeypatch.setattr(
        "presage.schemas.dataset.accesses._decode_narrow", remember(accesses._decode_narrow)
    )
    monkeypatch.setattr("presage.schemas.dataset.opened.step_distances", remember(step_distances))
    steps = indexed_steps(dataset, dataset.open_index(dataset.manifest.indexes[0]), "items")
    for _ in steps:
        assert sum(each() is not None for each in decoded) <= 2
    assert len(decoded) >= 2 * 2 * 3


def test_files_are_unmapped_with_what_reads_them(tmp_path: Path) -> None:
    dataset = write_lists(tmp_path / "dataset", [[np.arange(3)] * 4] * 2, (32, 2, "none", 0))
    index, maps = dataset.open_index(dataset.manifest.indexes[0]), Path("/proc/self/maps")
    gc.disable()
    try:
        steps = indexed_steps(dataset, index, "items")
        assert len(next(steps)[0]) == 3
        assert str(dataset.directory) in maps.read_text()
        del steps
        assert str(dataset.directory) not in maps.read_text()
    finally:
        gc.enable()


def test_run_of_one_segment_and_epoch_has_the_stored_distances(tmp_path: Path) -> None:
    segments = [[np.array([3, 5]), np.array([5]), np.array([3, 4])], [np.array([3])]]
    dataset = write_lists(tmp_path / "dataset", segments, (16, 1, "none", 0))
    alone = select_segments(dataset, [dataset.segments[0].id])
    index = alone.open_index(alone.manifest.indexes[0])
    stored = index.parts[0].steps("items")
    found = NextUses(alone, index, "items")
    assert [step.tolist() for step in found] == [stored[t].tolist() for t in range(3)]
    assert [step.tolist() for step in found] == [[2, 1], [0], [0, 0]]


def test_part_of_another_segment_is_refused(tmp_path: Path) -> None:
    segments = [[np.array([3, 5])], [np.array([3, 4])]]
    dataset = write_lists(tmp_path / "dataset", segments, (16, 1, "none", 0))
    (entry,) = dataset.manifest.indexes
    one, other = (s.id for s in dataset.segments)
    swapped = replace(entry, parts={one: entry.parts[other], other: entry.parts[one]})
    with pytest.raises(SchemaError, match=r"^part must be of the segment 00000-lists with sha256 "):
        dataset.open_index(swapped)
