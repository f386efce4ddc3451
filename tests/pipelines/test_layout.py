"""Layouts of groups and encodings of files: what is stored reads back as the samples."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.pipelines.build import build
from presage.pipelines.clustering.star import Star
from presage.pipelines.clustering.storage_layout import (
    TRIAL_BYTES,
    Encodings,
    StoredGroup,
    StoredTable,
    as_stored,
    candidate_encodings,
    choose_encodings,
    choose_layout,
    num_bytes,
    open_writer,
    sample_sessions,
    stored_tables,
    trial_rows,
    try_columns,
)
from presage.pipelines.report.facts import shared_rows
from presage.pipelines.report.sizes import bytes_by_table, dataset_bytes
from presage.pipelines.samples.sql import LIST_INDEX
from presage.pipelines.samples.tuples import Tuples
from presage.pipelines.sources.raw_rows import ORIGIN
from presage.pipelines.table.expand import content_hash
from presage.pipelines.table.verify import verify
from presage.schemas.arrays import Jagged, comparable_tuple, join_times, large_list, offsets_of
from presage.schemas.config.job import DataConfig, SamplesConfig, SessionConfig, SourceConfig
from presage.schemas.dataset.checked_files import CheckedFile
from presage.schemas.dataset.group_files import group_schema, read_group
from presage.schemas.dataset.opened import OpenDataset, open_dataset
from presage.schemas.dataset.samples import read_samples
from presage.schemas.errors import SchemaError
from presage.schemas.layout import BLOCK, DATA_DIRECTORIES, UNIQUE_INDEX, window_columns
from tests.pipelines.logs import bytes_of, request, stored_table
from tests.pipelines.shifting import STORAGES, built_in_every_layout, stored_as

LAYOUTS = [
    StoredGroup(),
    StoredGroup(True, ()),
    StoredGroup(False, ("items", "scores", "tags")),
    StoredGroup(True, ("items",)),
    StoredGroup(True, ("scores", "tags", "items")),
]
TEXTS = ["", "a", "ab", "b", "\N{SNOWMAN}"]
FLOATS = [0.0, -0.0, 1.5, float("nan"), float("inf")]


@dataclass(frozen=True)
class InMemory:
    """A file of a part whose row groups are slices of a table."""

    stored: StoredTable

    @property
    def schema(self) -> pa.Schema:
        return self.stored.table.schema

    def read_row_group(self, row_group: int, columns: Sequence[str] | None = None) -> pa.Table:
        start = sum(self.stored.row_groups[:row_group])
        found = self.stored.table.slice(start, self.stored.row_groups[row_group])
        return found if columns is None else found.select(columns)


def star_of(table: pa.Table) -> Star:
    """A part of one group, whose equal tuples are found by their text."""
    names = table.column_names[2:]
    texts = [str(row) for row in table.select(names).to_pylist()]
    tuples = np.array([texts.index(text) for text in texts], np.int64)
    none = np.empty(0, np.int64)
    return Star(pa.table({}), {"g": table}, none, {"g": none}, {"g": none}, {"g": tuples})


def opened(files: Sequence[StoredTable]) -> Callable[[str], CheckedFile]:
    by_path = {file.path: InMemory(file) for file in files}
    return lambda path: cast(CheckedFile, by_path[path])


def same(left: pa.Table, right: pa.Table) -> bool:
    """Compare bit by bit: NaNs, signed zeros, null and empty lists."""
    if left.schema != right.schema:
        return False
    pairs = zip(
        comparable_tuple(left, left.column_names),
        comparable_tuple(right, right.column_names),
        strict=True,
    )
    return all(
        np.array_equal(a.values.view(np.uint8), b.values.view(np.uint8))
        and np.array_equal(a.offsets, b.offsets)
        if isinstance(a, Jagged) and isinstance(b, Jagged)
        else not isinstance(a, Jagged) and not isinstance(b, Jagged) and a.tobytes() == b.tobytes()
        for a, b in pairs
    )


@st.composite
def parts(draw: st.DrawFn) -> tuple[pa.Table, list[int]]:
    """Rows of a group, and how many each row group has."""
    row_groups = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    n = sum(row_groups)
    rows = st.tuples(
        st.integers(0, 2) | st.none(),
        st.none() | st.lists(st.integers(-1, 1), max_size=5),
        st.none() | st.lists(st.sampled_from(FLOATS), max_size=4),
        st.none() | st.lists(st.sampled_from(TEXTS), max_size=4),
    )
    pool = draw(st.lists(rows, min_size=1, max_size=5))
    chosen = [draw(st.sampled_from(pool)) for _ in range(n)]
    table = pa.table(
        {
            BLOCK: pa.array(np.arange(n) // 2 + (3 << 20)),
            UNIQUE_INDEX: pa.array((np.arange(n) % 2).astype(np.int32)),
            "user": pa.array([c[0] for c in chosen], pa.int64()),
            "items": pa.array([c[1] for c in chosen], pa.large_list(pa.int64())),
            "scores": pa.array([c[2] for c in chosen], pa.large_list(pa.float32())),
            "tags": pa.array([c[3] for c in chosen], pa.large_list(pa.string())),
        }
    )
    return table, row_groups


@pytest.mark.slow
@given(parts(), st.sampled_from(LAYOUTS))
def test_group_is_read_back_bit_by_bit_in_every_layout(
    part: tuple[pa.Table, list[int]], layout: StoredGroup
) -> None:
    table, row_groups = part
    files = list(stored_tables("g", star_of(table), layout, row_groups, 3))
    assert all(count > 0 for file in files for count in file.row_groups)
    start = 0
    for number, count in enumerate(row_groups):
        meant = table.slice(start, count)
        assert same(read_group(opened(files), "g", 3, number), meant)
        some = [BLOCK, "scores", "user"]
        assert same(read_group(opened(files), "g", 3, number, some), meant.select(some))
        start += count


@pytest.mark.parametrize("layout", LAYOUTS)
def test_types_of_a_group_are_told_from_its_files(layout: StoredGroup) -> None:
    table = part_of_shifting_histories(20)
    layout = replace(layout, windows=tuple(w for w in layout.windows if w in table.column_names))
    files = opened(list(stored_tables("g", star_of(table), layout, [20], 0)))
    found = group_schema(lambda path: files(path).schema, "g", 0)
    assert {f.name: f.type for f in found} == {f.name: f.type for f in list(table.schema)[2:]}


def part_of_shifting_histories(num_rows: int, num_users: int = 1) -> pa.Table:
    """Rows whose history has one item more each time, the oldest falling off."""
    item = np.random.default_rng(0).integers(0, 1 << 40, num_rows)
    histories = [item[max(0, i - 30) : i].tolist() for i in range(num_rows)]
    return pa.table(
        {
            BLOCK: pa.array(np.zeros(num_rows, np.int64)),
            UNIQUE_INDEX: pa.array(np.arange(num_rows, dtype=np.int32)),
            "user": pa.array(np.arange(num_rows) * num_users // num_rows),
            "items": pa.array(histories, pa.large_list(pa.int64())),
        }
    )


def test_choice_follows_what_repeats() -> None:
    shifting = part_of_shifting_histories(3000)
    alone = np.arange(3000)
    assert choose_layout(shifting, alone) == StoredGroup(False, ("items",))
    items = np.random.default_rng(2).integers(0, 1 << 40, 3000)
    again = np.random.default_rng(3).integers(0, 3000, 20_000)
    columns = {"item": items, "price": items // 7, "brand": items // 11}
    catalogue = pa.table(columns).take(pa.array(again))
    place = pa.array(np.arange(20_000))
    catalogue = catalogue.add_column(0, BLOCK, place).add_column(1, UNIQUE_INDEX, place)
    assert choose_layout(catalogue, again) == StoredGroup(True)
    assert choose_layout(catalogue.slice(0, 50), again[:50]) == StoredGroup()
    rng = np.random.default_rng(1)
    random = shifting.set_column(
        3,
        "items",
        pa.array(rng.integers(0, 1 << 40, (3000, 20)).tolist(), pa.large_list(pa.int64())),
    )
    assert choose_layout(random, alone) == StoredGroup()
    empty = shifting.set_column(3, "items", pa.array([[]] * 3000, pa.large_list(pa.int64())))
    assert choose_layout(empty, alone) == StoredGroup()


def test_reference_outside_its_row_group_is_refused() -> None:
    table = part_of_shifting_histories(8)
    files = list(stored_tables("g", star_of(table), StoredGroup(True), [5, 3], 0))
    head = next(f for f in files if f.path.startswith("groups/"))
    moved = head.table.set_column(2, "tuple_index", pa.array(np.full(8, 7)))
    files[files.index(head)] = replace(head, table=moved)
    message = "tuple_index must be in its row group, in [0, 5), got 7; rebuild the dataset"
    with pytest.raises(SchemaError, match=re.escape(message)):
        read_group(opened(files), "g", 0, 0)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One log, built in every layout."""
    return built_in_every_layout(tmp_path_factory.mktemp("stored"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in STORAGES if n != "plain"])
def test_layouts_change_bytes_and_nothing_else(datasets: dict[str, Path], name: str) -> None:
    plain, other = datasets["plain"], datasets[name]
    assert verify(other)["problems"] == []
    assert same(stored_table(plain, model_inputs=True), stored_table(other, model_inputs=True))
    if name == "auto":  # which stores the items per sample
        return
    (left,), (right,) = (open_dataset(d).segments for d in (plain, other))
    assert left.manifest.groups == right.manifest.groups
    assert left.manifest.tables == right.manifest.tables
    assert left.blocks.drop_columns(["row_group"]) == right.blocks.drop_columns(["row_group"])
    unchanged = ("samples", "access", "edges", "statistics", "anomalies")
    one, two = (bytes_of(s.directory) for s in (left, right))
    assert {p: b for p, b in one.items() if p.startswith(unchanged)} == {
        p: b for p, b in two.items() if p.startswith(unchanged)
    }


@pytest.mark.slow
def test_tuples_that_cost_more_than_plain_columns_are_stored_per_sample(
    datasets: dict[str, Path],
) -> None:
    plain, auto = (open_dataset(datasets[name]) for name in ("plain", "auto"))
    (segment,) = auto.segments
    assert plain.segments[0].manifest.groups["item"].dedup_factor > 1.1
    assert segment.manifest.groups["item"].dedup_factor == 1
    assert np.array_equal(segment.num_unique("item"), segment.column("num_samples"))
    one, other = map(bytes_by_table, (plain, auto))
    assert other["item"] + other["samples"] < one["item"] + one["samples"]


def test_layouts_lie_where_the_format_says(datasets: dict[str, Path]) -> None:
    directories = {
        name: {
            p.split("/0")[0]
            for s in open_dataset(dataset).segments
            for p in s.files
            if p.startswith(("tuples/", "buffers/"))
        }
        for name, dataset in datasets.items()
    }
    assert directories["plain"] == set()
    assert directories["windows"] == {"buffers/history"}
    assert directories["shared"] == {"tuples/user", "tuples/item"}
    assert directories["both"] == {"tuples/user", "tuples/item", "buffers/history"}


def test_chosen_layout_of_shifting_histories_is_smaller(datasets: dict[str, Path]) -> None:
    sizes = {name: bytes_by_table(open_dataset(d)) for name, d in datasets.items()}
    assert sizes["auto"]["user"] < 0.9 * sizes["plain"]["user"]
    for name, dataset in datasets.items():
        assert sum(sizes[name].values()) == dataset_bytes(open_dataset(dataset))


def test_report_counts_what_is_shared_beyond_blocks(datasets: dict[str, Path]) -> None:
    assert shared_rows(open_dataset(datasets["plain"])) == []
    both = {s.name: s for s in shared_rows(open_dataset(datasets["both"]))}
    (segment,) = open_dataset(datasets["both"]).segments
    user, item = (segment.manifest.groups[g] for g in ("user", "item"))
    assert set(both) == {"user", "item", "history"}
    assert both["user"].per_block == user.num_unique > both["user"].stored > 0
    assert 50 <= both["item"].stored < both["item"].per_block == item.num_unique
    assert both["history"].per_block == user.num_values_dedup > 3 * both["history"].stored


def written(table: pa.Table, encodings: Encodings) -> pa.Buffer:
    """Return the bytes of a file."""
    sink = pa.BufferOutputStream()
    with open_writer(sink, table.schema, encodings) as writer:
        writer.write_table(table)
    return sink.getvalue()


def chunk_bytes(buffer: pa.Buffer) -> int:
    """Return the bytes of all column chunks of a file, the footer left out."""
    metadata = pq.read_metadata(pa.BufferReader(buffer))
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    return sum(g.column(i).total_compressed_size for g in groups for i in range(g.num_columns))


def lists(rng: np.random.Generator, num_rows: int, length: int) -> pa.Array:
    lengths = rng.integers(0, length, num_rows)
    return large_list(rng.integers(0, 1 << 20, lengths.sum()), offsets_of(lengths))


def columns(rng: np.random.Generator) -> dict[str, pa.Array]:
    """Return one column of each kind that format 1 has, some with nulls."""
    n = 3000
    return {
        "ascending ids": pa.array(np.arange(n) * 7 + 1_000_000_000),
        "few ids": pa.array(rng.integers(0, 9, n)),
        "random ids": pa.array(rng.integers(-(1 << 62), 1 << 62, n)),
        "narrow ids with nulls": pa.array([None, 3, -4] * (n // 3), pa.int8()),
        "floats with nan": pa.array(np.where(rng.random(n) < 0.1, np.nan, rng.random(n))),
        "rounded floats": pa.array(rng.integers(0, 100, n).astype(np.float32) / 8),
        "texts": pa.array([f"item {i % 50}" if i % 7 else None for i in range(n)]),
        "flags": pa.array(rng.random(n) < 0.5),
        "times": pa.array([datetime(2026, 1, 1 + i % 28) for i in range(n)], pa.timestamp("us")),
        "lists": lists(rng, n, 5),
        "empty lists": large_list(np.empty(0, np.int64), np.zeros(n + 1, np.int64)),
        "nulls": pa.array([None] * n, pa.float32()),
    }


COLUMNS = columns(np.random.default_rng(0))


@pytest.mark.parametrize("name", COLUMNS)
def test_chosen_encoding_keeps_every_value_and_is_the_smallest_candidate(name: str) -> None:
    table = pa.table({name: COLUMNS[name]})
    chosen = choose_encodings(table)
    buffer = written(table, chosen)
    others = [
        chunk_bytes(written(table, {path: e}))
        for path, usable in candidate_encodings(table.schema.field(0)).items()
        for e in usable
    ]
    assert chunk_bytes(buffer) == min(others)
    back = pq.read_table(pa.BufferReader(buffer), page_checksum_verification=True)
    assert back.schema.equals(table.schema)
    assert str(back[name].to_pylist()) == str(table[name].to_pylist())


def test_microbatches_of_nested_columns_are_encoded_one_by_one() -> None:
    rng = np.random.default_rng(4)
    pairs = [{"id": i * 3, "tags": ["x" * 30] * (i % 3)} for i in range(5000)]
    table = pa.table(
        {
            "pair": pa.array(pairs, pa.struct({"id": pa.int64(), "tags": pa.list_(pa.string())})),
            "map": pa.array([[("k", i % 9)] for i in range(5000)], pa.map_("string", "int32")),
            "price": pa.array(rng.integers(0, 99, 5000)).cast(pa.decimal128(21)),
            "category": pa.array([f"c{i % 4}" for i in range(5000)]).dictionary_encode(),
            "half": pa.array(rng.random(5000).astype(np.float16)),
        }
    )
    chosen = choose_encodings(table)
    assert set(chosen) == {
        "pair.id",
        "pair.tags.list.element",
        "map.key_value.key",
        "map.key_value.value",
        "price",
        "category",
        "half",
    }
    assert chosen["pair.id"] == "DELTA_BINARY_PACKED"
    buffer = written(table, chosen)
    plain = dict.fromkeys(chosen, "PLAIN")
    assert chunk_bytes(buffer) < 0.7 * chunk_bytes(written(table, plain))
    assert pq.read_table(pa.BufferReader(buffer)).equals(table)


@pytest.mark.parametrize(("unit", "is_split"), [(10**6, True), (1, False)])
def test_times_are_stored_in_two_parts_where_these_take_less(unit: int, is_split: bool) -> None:
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.integers(0, 600_000_000, 3000)) // unit * unit - 10**11
    column = pa.array(times, pa.int64(), mask=rng.random(3000) < 0.1).cast(pa.timestamp("us"))
    table = pa.table({"id": np.arange(3000), "time": column})
    trials = try_columns(table)
    encodings = {leaf: trial.encoding for leaf, trial in trials.items()}
    parts = {"time.seconds", "time.microseconds"} if is_split else {"time"}
    assert set(encodings) == {"id", *parts}
    buffer = written(as_stored(table, encodings), encodings)
    assert chunk_bytes(buffer) == num_bytes(trials)
    assert join_times(pq.read_table(pa.BufferReader(buffer))).equals(table)


def test_choice_does_not_depend_on_chunks() -> None:
    table = pa.table(COLUMNS)
    cut = pa.concat_tables([table.slice(0, 100), table.slice(100, 1), table.slice(101)])
    assert choose_encodings(cut) == choose_encodings(table)


def test_long_histories_that_return_late_are_found_again() -> None:
    rng = np.random.default_rng(1)
    users = [rng.integers(0, 1 << 40, 5000).tolist() for _ in range(4)]  # 160 kB together
    table = pa.table({"history": pa.array(users * 20, pa.large_list(pa.int64()))})
    assert written(table, choose_encodings(table)).size < 1.2 * 160_000


def test_trial_sees_a_page_of_long_lists_and_at_least_one_row() -> None:
    table = pa.table({"history": lists(np.random.default_rng(3), 10_000, 400)})
    seen = trial_rows(table)
    assert 0.9 * TRIAL_BYTES < seen.nbytes <= TRIAL_BYTES
    one = pa.table({"history": pa.array([[1] * 2_000_000] * 2, pa.large_list(pa.int64()))})
    assert trial_rows(one).num_rows == 1
    assert choose_encodings(table.slice(0, 0)) == choose_encodings(table.slice(0, 0))


DATA = DataConfig(
    sources={"log": SourceConfig(files="*", format="parquet")},
    samples=SamplesConfig(map="SELECT * FROM log"),
    session=SessionConfig(key="s", time="t"),
    tables={},
)


def parts_of(sessions: np.ndarray, cuts: list[int]) -> list[Tuples]:
    times = np.arange(len(sessions))
    rows = pa.table({"s": sessions, "t": times, ORIGIN: times, LIST_INDEX: times * 0})
    bounds = [0, *cuts, len(sessions)]
    return [Tuples(rows.slice(a, b - a), {}, {}) for a, b in pairwise(bounds)]


def chosen(parts: list[Tuples], limit: int) -> dict[int, int]:
    keys = sample_sessions(parts, DATA, limit).samples["s"].to_pylist()
    return {key: keys.count(key) for key in set(keys)}


def test_few_sessions_are_whole_and_do_not_depend_on_order_or_cuts() -> None:
    sessions = np.repeat(np.arange(100), np.arange(1, 101))
    shuffled = np.random.default_rng(0).permutation(sessions)
    found = chosen(parts_of(sessions, [100, 2000]), 500)
    assert found == chosen(parts_of(shuffled, [7, 1000, 3000]), 500)
    assert all(count == key + 1 for key, count in found.items())
    assert 500 <= sum(found.values()) <= 600


def test_a_part_with_few_samples_is_looked_at_whole() -> None:
    sessions = np.repeat(np.arange(10), 3)
    assert sum(chosen(parts_of(sessions, [4]), 500).values()) == 30


def test_a_hot_session_is_cut_by_time() -> None:
    parts = parts_of(np.zeros(1000, np.int64), [300, 301])
    found = sample_sessions(parts, DATA, 100).samples
    assert found["t"].to_pylist() == list(range(200))


OF_SESSIONS = ("key: session_id", "key: session_id")
OF_USERS = ("key: session_id", "key: user_id")


def history_bytes(dataset: OpenDataset) -> int:
    """Bytes of the histories: column chunks, and all of the buffers' files."""
    (segment,) = dataset.segments
    total = 0
    for path, entry in segment.files.items():
        if path.startswith("buffers/history/"):
            total += entry.num_bytes
        elif path.startswith(DATA_DIRECTORIES):
            metadata = pq.read_metadata(segment.directory / path)
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
            chunks = [g.column(i) for g in groups for i in range(g.num_columns)]
            wanted = {"history", *window_columns("history")}
            own = [c for c in chunks if c.path_in_schema.split(".")[0] in wanted]
            total += sum(c.total_compressed_size for c in own)
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(OF_SESSIONS, id="sessions"),
        pytest.param(OF_USERS, id="users", marks=pytest.mark.nightly),
    ],
)
def test_histories_that_shift_take_two_and_a_half_times_less_as_windows(
    shared_data: Path, repository: Path, tmp_path: Path, keys: tuple[str, str]
) -> None:
    log = shared_data / "30music_sample10"
    if not log.is_dir():
        pytest.skip("30Music is not in the shared data")
    source = repository / "schemas" / "thirtymusic"
    text = (source / "job.yaml").read_text().replace(*keys)
    found: dict[str, OpenDataset] = {}
    for name, layouts in {"auto": None, "none": {}}.items():
        directory = tmp_path / name
        directory.mkdir()
        (directory / "job.yaml").write_text(text)
        shutil.copy(source / "schema.pbtxt", directory)
        with stored_as(layouts):
            build(request(directory / "job.yaml", log, directory / "dataset"))
        found[name] = open_dataset(directory / "dataset")
    auto, none = (content_hash(read_samples(found[n], True)) for n in ("auto", "none"))
    assert auto == none
    assert auto.num_rows == 343_183
    assert history_bytes(found["none"]) >= 2.5 * history_bytes(found["auto"])
    tables = [d.segments[0].manifest.tables for d in found.values()]
    assert tables[0] == tables[1]
    edges = [
        {p: e.sha256 for p, e in d.segments[0].files.items() if p.startswith(("access", "edges"))}
        for d in found.values()
    ]
    assert edges[0] == edges[1]
