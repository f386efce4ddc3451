"""A dataset is read back: the star joins to the samples, the oracle equals their lookups."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from presage.schemas.dataset.accesses import TableAccesses, num_unique_rows
from presage.schemas.dataset.opened import OpenDataset, open_dataset, select_segments
from presage.schemas.dataset.run_next_uses import indexed_steps
from presage.schemas.errors import SchemaError
from tests.schemas.reference import next_use
from tests.schemas.tiny import GROUPS, PLACES, TABLES, lookups_of, samples_of, write_dataset


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny dataset of two segments."""
    path = tmp_path_factory.mktemp("datasets") / "tiny"
    write_dataset(path)
    return path


@pytest.fixture(scope="module")
def dataset(root: Path) -> OpenDataset:
    return open_dataset(root)


def test_open_dataset_gives_back_manifests_job_and_features(dataset: OpenDataset) -> None:
    assert dataset.job.name == "tiny"
    assert dataset.features.label == "clicked"
    assert [segment.manifest.num_samples for segment in dataset.segments] == [70, 70]
    segment = dataset.segments[0]
    assert segment.block_ids.tolist() == [place.block for place in PLACES]
    assert segment.positions("train").tolist() == [0, 1, 2, 3]
    assert segment.positions("evaluation").tolist() == [4]
    assert segment.positions("test").tolist() == []
    assert segment.num_unique("user").sum() == segment.manifest.groups["user"].num_unique


@pytest.mark.parametrize("segment_index", [0, 1])
def test_star_joins_to_the_samples(dataset: OpenDataset, segment_index: int) -> None:
    segment = dataset.segments[segment_index]
    expected = samples_of(segment_index)
    for position, place in enumerate(PLACES):
        row = segment.blocks.slice(position, 1).to_pylist()[0]
        samples = segment.file(f"samples/{row['file']:05d}.parquet").read_row_group(
            row["row_group"]
        )
        samples = samples.filter(samples["block"].to_numpy() == row["block"])
        mine = expected.slice(place.rows[0], place.rows[1] - place.rows[0])
        assert len(samples) == row["num_samples"] == len(mine)
        for group, columns in GROUPS.items():
            unique = segment.file(f"groups/{group}/{row['file']:05d}.parquet").read_row_group(
                row["row_group"]
            )
            unique = unique.filter(unique["block"].to_numpy() == row["block"])
            assert len(unique) == row[f"{group}_num_unique"]
            assert unique["unique_index"].to_pylist() == list(range(len(unique)))
            joined = unique.take(samples[f"{group}_inverse"].combine_chunks())
            for column in columns:
                assert joined[column].to_pylist() == mine[column].to_pylist()
        for column in ("clicked", "item_id", "price", "time"):
            assert samples[column].to_pylist() == mine[column].to_pylist()


def rows_of_steps(table: str) -> list[list[int]]:
    """The distinct rows of each step by the samples alone: two epochs of two blocks a step.

    The first row group has two blocks, the others one each: a step has a block of each lane.
    """
    steps: list[list[int]] = []
    for segment in (0, 1):
        lookups = lookups_of(samples_of(segment), table)
        blocks = [set(np.concatenate(lookups[s : s + 16]).tolist()) for s in range(0, 64, 16)]
        steps += [sorted(blocks[0] | blocks[2]), sorted(blocks[1] | blocks[3])]
    return steps * 2


@pytest.mark.parametrize("table", TABLES)
def test_indexed_steps_equal_the_look_ups_of_the_samples(dataset: OpenDataset, table: str) -> None:
    order = dataset.order(32, 2, "none", 0)
    index = dataset.index_for(order)
    rows = TableAccesses(dataset, table, order).rows
    expected = rows_of_steps(table)
    distance_of = [
        dict(zip(step, later, strict=True))
        for step, later in zip(expected, next_use(expected), strict=True)
    ]
    steps = list(indexed_steps(dataset, index, table))
    assert len(steps) == len(expected) == index.order.num_steps
    for step, (numbers, distances) in enumerate(steps):
        assert (np.diff(numbers) > 0).all()
        assert sorted(rows[numbers].tolist()) == expected[step]
        assert [distance_of[step][row] for row in rows[numbers].tolist()] == distances.tolist()
    assert sum(len(numbers) for numbers, _ in steps) == index.num_accesses(table)
    assert len(rows) == num_unique_rows(dataset, table) == len(set().union(*expected))


def test_accesses_follow_a_shuffled_order(dataset: OpenDataset) -> None:
    order = dataset.order(16, 1, "blocks", 3)
    accesses = TableAccesses(dataset, "items", order)
    for train_step, numbers in enumerate(accesses.steps()):
        step = order.step(train_step)
        start = int(step.positions[0]) * 16
        lookups = lookups_of(samples_of(step.segment), "items")[start : start + 16]
        assert set(accesses.rows[numbers].tolist()) == set(np.concatenate(lookups).tolist())


def test_index_for_another_order_names_the_command_that_builds_it(
    dataset: OpenDataset, root: Path
) -> None:
    message = (
        "dataset has no index for batch_samples=64, epochs=2, shuffle=none, seed=0, closest: "
        f"batch_samples=32 in {root}; run python -m presage.pipelines oracle {root} "
        "--reindex --batch-samples 64 --epochs 2 --shuffle none --seed 0"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        dataset.index_for(dataset.order(64, 2, "none", 0))


def test_index_needs_a_part_of_each_selected_segment(dataset: OpenDataset) -> None:
    order, (entry,) = dataset.order(32, 2, "none", 0), dataset.manifest.indexes
    assert dataset.index_for(order).entry == entry
    one, other = (segment.id for segment in dataset.segments)
    fewer = replace(entry, parts={other: entry.parts[other]})
    fewer = replace(dataset, manifest=replace(dataset.manifest, indexes=(fewer,)))
    selected = select_segments(fewer, [other])
    (part,) = selected.index_for(selected.order(32, 2, "none", 0)).parts
    assert part.directory == dataset.directory / "index-tiny" / other
    for name, got in ((one, "none"), (None, "parts of 1 of 2 segments")):
        lacking = fewer if name is None else select_segments(fewer, [name])
        message = rf"^dataset has no index for batch_samples=32.* closest: {got} in "
        with pytest.raises(SchemaError, match=message):
            lacking.index_for(lacking.order(32, 2, "none", 0))
    without = replace(dataset, manifest=replace(dataset.manifest, indexes=()))
    with pytest.raises(SchemaError, match=r"^dataset has no index for .* closest: none in "):
        without.index_for(order)


def test_order_of_a_batch_that_cuts_blocks_raises(dataset: OpenDataset) -> None:
    message = "batch_samples must be a multiple of block_samples, got 40 and 16; use 32"
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        dataset.order(40, 1, "none", 0)


MISSING = {
    "table": (
        lambda segment: segment.access_files("none"),
        "table has no files in access/: 'none' in {}/MANIFEST.json; rebuild the dataset",
    ),
    "file": (
        lambda segment: segment.file("samples/00009.parquet"),
        "file is not listed: 'samples/00009.parquet' in {}/files.parquet; rebuild the dataset",
    ),
}


@pytest.mark.parametrize(("call", "message"), MISSING.values(), ids=MISSING.keys())
def test_part_that_a_segment_lacks_raises(dataset: OpenDataset, call, message: str) -> None:
    segment = dataset.segments[0]
    with pytest.raises(SchemaError, match=f"^{re.escape(message.format(segment.directory))}$"):
        call(segment)


def test_open_dataset_of_an_unfinished_build_raises(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "unfinished"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("_manifests"))
    message = (
        f"there is no dataset: no build was committed in {copy}; build it, or correct the path"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        open_dataset(copy)
