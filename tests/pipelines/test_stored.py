"""Groups that share tuples and lists: what lies in the files, read back, is what was meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.clustering.dedup import GroupLayout, Star, StoredTable, choose_layout, stored_tables
from pipelines.clustering.reader import expand
from pipelines.report.dedup import beyond_blocks, shared_of
from pipelines.report.storage import bytes_by_table, dataset_bytes
from pipelines.table.verify import verify
from schemas.arrays import Jagged, comparable_tuple
from schemas.config.job import StorageConfig
from schemas.dataset import open_dataset
from schemas.errors import SchemaError
from schemas.group_files import group_schema, read_group
from schemas.layout import BLOCK, UNIQUE_INDEX
from tests.pipelines.logs import bytes_of
from tests.pipelines.shifting import STORAGES, built_in_every_layout

LAYOUTS = [
    GroupLayout(),
    GroupLayout(True, ()),
    GroupLayout(False, ("items", "scores", "tags")),
    GroupLayout(True, ("items",)),
    GroupLayout(True, ("scores", "tags", "items")),
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
    return Star(pa.table({}), {"g": table}, none, {"g": none}, {"g": tuples})


def opened(files: Sequence[StoredTable]) -> Callable[[str], InMemory]:
    by_path = {file.path: InMemory(file) for file in files}
    return lambda path: by_path[path]


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
@settings(max_examples=150, deadline=None)
@given(parts(), st.sampled_from(LAYOUTS))
def test_group_is_read_back_bit_by_bit_in_every_layout(
    part: tuple[pa.Table, list[int]], layout: GroupLayout
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
def test_types_of_a_group_are_told_from_its_files(layout: GroupLayout) -> None:
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
    auto = StorageConfig()
    assert choose_layout(shifting, alone, "g", auto) == GroupLayout(False, ("items",))
    assert choose_layout(shifting, alone, "g", StorageConfig(windows="none")) == GroupLayout()
    items = np.random.default_rng(2).integers(0, 1 << 40, 3000)
    again = np.random.default_rng(3).integers(0, 3000, 20_000)
    columns = {"item": items, "price": items // 7, "brand": items // 11}
    catalogue = pa.table(columns).take(pa.array(again))
    place = pa.array(np.arange(20_000))
    catalogue = catalogue.add_column(0, BLOCK, place).add_column(1, UNIQUE_INDEX, place)
    assert choose_layout(catalogue, again, "g", auto) == GroupLayout(True)
    assert choose_layout(catalogue.slice(0, 50), again[:50], "g", auto) == GroupLayout()
    rng = np.random.default_rng(1)
    random = shifting.set_column(
        3,
        "items",
        pa.array(rng.integers(0, 1 << 40, (3000, 20)).tolist(), pa.large_list(pa.int64())),
    )
    assert choose_layout(random, alone, "g", auto) == GroupLayout()
    forced = StorageConfig(windows=("g",), shared_tuples=("g",))
    assert choose_layout(random, alone, "g", forced) == GroupLayout(True, ("items",))
    assert choose_layout(random, alone, "other", forced) == GroupLayout()


def test_reference_outside_its_row_group_is_refused() -> None:
    table = part_of_shifting_histories(8)
    files = list(stored_tables("g", star_of(table), GroupLayout(True), [5, 3], 0))
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
def test_layouts_change_bytes_and_nothing_else(
    datasets: dict[str, Path], name: str, tmp_path: Path
) -> None:
    plain, other = datasets["plain"], datasets[name]
    assert verify(other)["problems"] == []
    tables = []
    for index, dataset in enumerate((plain, other)):
        expand(dataset, tmp_path / f"{index}.parquet", model_inputs=True)
        tables.append(pq.read_table(tmp_path / f"{index}.parquet"))
    assert same(*tables)
    (left,), (right,) = (open_dataset(d).segments for d in (plain, other))
    assert left.manifest.groups == right.manifest.groups
    assert left.manifest.tables == right.manifest.tables
    assert left.blocks.drop_columns(["row_group"]) == right.blocks.drop_columns(["row_group"])
    unchanged = ("samples", "access", "edges", "statistics", "anomalies")
    one, two = (bytes_of(s.directory) for s in (left, right))
    assert {p: b for p, b in one.items() if p.startswith(unchanged)} == {
        p: b for p, b in two.items() if p.startswith(unchanged)
    }


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


def test_automatic_layout_is_never_larger_than_plain(datasets: dict[str, Path]) -> None:
    sizes = {name: bytes_by_table(open_dataset(d)) for name, d in datasets.items()}
    for group in ("user", "item"):
        assert sizes["auto"][group] <= sizes["plain"][group]
    assert sizes["auto"]["user"] < 0.9 * sizes["plain"]["user"]
    for name, dataset in datasets.items():
        assert sum(sizes[name].values()) == dataset_bytes(open_dataset(dataset))


def test_report_counts_what_is_shared_beyond_blocks(datasets: dict[str, Path]) -> None:
    assert shared_of(open_dataset(datasets["plain"])) == []
    both = {s.name: s for s in shared_of(open_dataset(datasets["both"]))}
    (segment,) = open_dataset(datasets["both"]).segments
    user, item = (segment.manifest.groups[g] for g in ("user", "item"))
    assert set(both) == {"user", "item", "history"}
    assert both["user"].by_block == user.num_unique > both["user"].stored > 0
    assert 50 <= both["item"].stored < both["item"].by_block == item.num_unique
    assert both["history"].by_block == user.num_values_dedup > 3 * both["history"].stored
    assert "times fewer" in beyond_blocks(open_dataset(datasets["both"]))
