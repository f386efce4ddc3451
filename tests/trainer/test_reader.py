import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from presage.schemas.arrays import Jagged
from presage.schemas.config.job import TableConfig, load_job
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from presage.schemas.layout import part_path
from presage.schemas.rows import rows_of_ids
from presage.trainer.data.collate import CollatedBatch
from presage.trainer.data.decode import SAMPLES, BlockCounts, decode, spec_of
from presage.trainer.data.reader import prefetch
from tests.shared import hard_links
from tests.trainer.make_dataset import make_samples, write_job
from tests.trainer.runs import SEGMENTS, reader_of

SPARSE = ("user", "clicked", "item", "page", "viewed")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


def bags(batch: CollatedBatch, feature: str) -> list[list[int]]:
    """Return the rows that each sample looks up, slowly."""
    jagged = batch.sparse[feature]
    values, offsets = jagged.values().tolist(), jagged.offsets().tolist()
    return [values[offsets[i] : offsets[i + 1]] for i in batch.inverse_of(feature).tolist()]


@pytest.mark.slow
def test_read_deduplicated_expands_to_the_expanded_batch(job: Path, dataset: Path) -> None:
    unique, expanded = reader_of(job, dataset), reader_of(job, dataset, expanded=True)
    fewer = 0
    for step in range(32):
        a, b = unique.read(step), expanded.read(step)
        assert torch.equal(a.labels, b.labels)
        assert torch.equal(a.weights, b.weights)
        assert torch.equal(a.dense, b.dense)
        for feature in SPARSE:
            assert bags(a, feature) == bags(b, feature)
        fewer += b.sparse.values().numel() - a.sparse.values().numel()
        assert a.sparse.stride() == b.sparse.stride() == a.num_samples
        keys, inverse = a.sparse.inverse_indices()
        assert keys == list(SPARSE)
        assert torch.equal(inverse[1], a.inverse_of("clicked"))
    assert fewer > 0


def test_read_gives_every_sample_once_per_epoch_as_it_was_written(job: Path, dataset: Path) -> None:
    reader, tables = reader_of(job, dataset), load_job(job).data.tables
    expected: list[tuple[object, ...]] = []
    for segment, files in enumerate(SEGMENTS):
        for number, (num_train, num_evaluation) in enumerate(files):
            samples = make_samples(num_train + num_evaluation, 100 * segment + number)
            expected += [sample_of(row, tables) for row in samples[:num_train].to_pylist()]
    for epoch in range(2):
        found: list[tuple[object, ...]] = []
        for step in range(16 * epoch, 16 * epoch + 16):
            found += samples_of(reader.read(step))
        assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("size", [4, 8, 16, 32, 128])
def test_microbatches_of_any_size_have_the_samples_of_their_step(
    job: Path, dataset: Path, size: int, expanded: bool
) -> None:
    whole = reader_of(job, dataset, expanded=expanded)
    reader = reader_of(job, dataset, expanded=expanded, microbatch_samples=size)
    for step in range(16):
        batch, parts = whole.read(step), reader.read_microbatches(step)
        assert parts.num_microbatches == len(parts.batches)
        assert [s for each in parts.batches for s in samples_of(each)] == samples_of(batch)
        assert max(each.num_samples for each in parts.batches) <= size
        for each in () if expanded else parts.batches:
            for inverse in each.groups.values():
                assert len(inverse.indices.unique()) == inverse.num_unique
        last = reader.read_microbatches(step, slice(parts.num_microbatches - 1, None), parts.rows)
        assert samples_of(last.batches[0]) == samples_of(parts.batches[-1])
        work = reader.microbatch_work(batch.step)
        assert len(work) == parts.num_microbatches
        assert sum(work) == pytest.approx(sum(whole.microbatch_work(batch.step)))


def test_few_files_stay_mapped_whatever_is_read(
    job: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [samples_of(reader_of(job, dataset).read(step)) for step in range(32)]
    dataset = hard_links(dataset, tmp_path / "dataset")  # not those of other tests' readers
    monkeypatch.setattr("presage.trainer.data.reader.OPEN_FILES", 3)
    reader = reader_of(job, dataset)
    for step in range(32):
        assert samples_of(reader.read(step)) == expected[step]
        assert len(mapped_files(dataset)) <= 3
    assert sum(batch.num_samples for batch in reader.evaluation_batches())
    assert 0 < len(mapped_files(dataset)) <= 3


def mapped_files(directory: Path) -> set[str]:
    """Files of a directory that this process maps; what holds them must not be garbage."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if f"{directory}/" in line}


def sample_of(row: dict, tables: Mapping[str, TableConfig]) -> tuple[object, ...]:
    table_of = {f: name for name, table in tables.items() for f in table.features}
    sparse: list[tuple[int, ...]] = []
    for feature in SPARSE:
        ids = row[feature] if isinstance(row[feature], list) else [row[feature]]
        ids = np.array([i for i in ids if i is not None], np.int64)
        name = table_of[feature]
        sparse.append(tuple(rows_of_ids(ids, name, tables[name]).tolist()))
    dense = (row["price"], 0.0 if row["age"] is None else row["age"])
    return (row["session"], row["clicked_flag"], row["sample_weight"], dense, *sparse)


def samples_of(batch: CollatedBatch) -> list[tuple[object, ...]]:
    sparse = [bags(batch, feature) for feature in SPARSE]
    return [
        (key, int(label), weight, tuple(dense), *(tuple(bag[i]) for bag in sparse))
        for i, (key, label, weight, dense) in enumerate(
            zip(
                batch.kept["session"].tolist(),
                batch.labels.tolist(),
                batch.weights.tolist(),
                batch.dense.tolist(),
                strict=True,
            )
        )
    ]


def test_read_does_not_depend_on_what_was_read_before(job: Path, dataset: Path) -> None:
    straight, jumping = reader_of(job, dataset), reader_of(job, dataset)
    forward = [straight.read(step) for step in range(16)]
    for step in (15, 3, 8, 3, 0):
        batch = jumping.read(step)
        assert torch.equal(batch.sparse.values(), forward[step].sparse.values())
        assert torch.equal(batch.dense, forward[step].dense)


def test_evaluation_batches_give_the_evaluation_split_once(job: Path, dataset: Path) -> None:
    found = [s for batch in reader_of(job, dataset).evaluation_batches() for s in samples_of(batch)]
    tables = load_job(job).data.tables
    expected = [
        sample_of(row, tables)
        for number, (num_train, num_evaluation) in enumerate(SEGMENTS[0])
        for row in make_samples(num_train + num_evaluation, number)[num_train:].to_pylist()
    ]
    assert found == expected


def places_of_bags(batch: CollatedBatch, feature: str) -> np.ndarray:
    first, step = batch.layout.of(feature)
    return first + step * np.arange(len(batch.sparse[feature].lengths()))


def test_lookups_hold_the_distinct_rows_of_every_feature(job: Path, dataset: Path) -> None:
    batch = reader_of(job, dataset).read(0)
    for lookup in batch.lookups.values():
        values = np.concatenate([batch.sparse[f].values().numpy() for f in lookup.features])
        assert lookup.rows.tolist() == sorted(set(values.tolist()))
        assert lookup.rows[lookup.positions.numpy()].tolist() == values.tolist()
        places = np.concatenate([places_of_bags(batch, f) for f in lookup.features])
        readers = Jagged(lookup.readers.numpy(), lookup.reader_offsets.numpy())
        offsets = lookup.bag_offsets.numpy()
        for place, row in enumerate(lookup.rows.tolist()):
            bag_of_value = np.searchsorted(offsets, np.flatnonzero(values == row), "right") - 1
            start, end = readers.offsets[place : place + 2]
            assert readers.values[start:end].tolist() == places[bag_of_value].tolist()


def test_decode_refuses_blocks_that_lie_elsewhere(dataset: Path) -> None:
    opened = open_dataset(dataset)
    segment = opened.segments[0]
    spec = spec_of(opened, "float64")
    names, sizes = segment.block_ids[:3], segment.column("num_samples")[:3]
    uniques = {group: segment.num_unique(group)[:3] for group in spec.groups}

    def read(owner: str, columns: list[str]) -> pa.Table:
        path = part_path(0, "samples") if owner == SAMPLES else part_path(0, "groups", owner)
        return segment.file(path).read_row_group(0, columns)

    counts = BlockCounts(blocks=names, samples=sizes, uniques=uniques)
    assert len(decode(spec, counts, read).labels) == 48
    message = (
        "row group of samples does not match blocks.parquet: 48 rows where it lists 48, "
        "or another order; rebuild the dataset"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        decode(spec, replace(counts, blocks=names[::-1]), read)
    fewer = {**uniques, "user": uniques["user"] - [0, 1, -1]}
    with pytest.raises(SchemaError, match=r"^row group of user does not match "):
        decode(spec, replace(counts, uniques=fewer), read)


def test_prefetched_keeps_the_order_and_hands_on_an_error() -> None:
    assert list(prefetch(lambda x: x * x, range(7), 2)) == [x * x for x in range(7)]
    numbers = prefetch(lambda x: 6 // (2 - x), range(5), 2)
    assert [next(numbers), next(numbers)] == [3, 6]
    with pytest.raises(ZeroDivisionError):
        next(numbers)
