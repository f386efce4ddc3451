"""A build with `groups: auto`: chosen from the training range, written into the job, kept."""

import dataclasses
import os
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.common.logs import with_auto
from presage.pipelines.autogroup.choose import (
    KeysOfSplit,
    SmallestHashes,
    cells_of,
    choose_from,
    choose_keys,
    named_groups,
    rewritten,
    sample_sessions,
)
from presage.pipelines.autogroup.search import GroupChoice
from presage.pipelines.build import build
from presage.pipelines.prepare import prepare
from presage.pipelines.samples import lookups
from presage.pipelines.sources.raw_rows import ORIGIN, InputSplit
from presage.pipelines.table.target import load_job_files
from presage.pipelines.table.verify import verify
from presage.pipelines.transforms.apply import columns_of
from presage.schemas.config.job import load_job
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location
from tests import real_logs
from tests.pipelines import test_executor
from tests.pipelines.logs import (
    bytes_of,
    copy_of,
    raw_rows,
    request,
    samples_of,
    stored_samples,
    stored_table,
    write_job,
    write_log,
)

NAMED = "{user: [session, user, history]}"


def auto_job(directory: Path, **changes: str) -> Path:
    job = write_job(directory)
    text = job.read_text().replace(f"groups: {NAMED}", "groups: auto  # ours")
    text = text.replace("transforms: {user: {", "transforms: {samples: {")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    job.write_text(text)
    return job


def built(directory: Path, num_rows: int = 3000) -> Path:
    write_log(directory / "log", num_rows)
    job = auto_job(directory / "job")
    build(request(job, directory / "log", directory / "dataset"))
    return directory / "dataset"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("auto"))


@pytest.mark.slow
def test_dataset_names_the_groups_and_puts_transforms_where_their_inputs_are(dataset: Path) -> None:
    job = open_dataset(dataset).job
    assert job.data.groups == {"session": ("session", "time", "user", "history")}
    assert job.data.transforms == {"session": {"num_history": "ln(1 + len(history))"}}
    text = (dataset / "job.yaml").read_text()
    assert re.search(
        r"session: \[session, time, user, history\]  # changes in 34\.6 % of the", text
    )
    assert "# ours" in text


@pytest.mark.slow
def test_dataset_holds_the_same_samples_as_with_named_groups(dataset: Path) -> None:
    assert stored_samples(dataset) == samples_of(raw_rows(3000, seed=0))
    assert verify(dataset)["problems"] == []


@pytest.mark.slow
def test_building_from_the_job_in_the_dataset_gives_the_same_segment(
    dataset: Path, tmp_path: Path
) -> None:
    write_log(tmp_path / "log", 3000)
    again = tmp_path / "again"
    schema = (dataset / "schema.pbtxt").read_bytes()
    (tmp_path / "schema.pbtxt").write_bytes(schema)
    (tmp_path / "job.yaml").write_bytes((dataset / "job.yaml").read_bytes())
    build(request(tmp_path / "job.yaml", tmp_path / "log", again))
    assert bytes_of(again) == bytes_of(dataset)


@pytest.mark.slow
def test_files_listed_in_another_order_give_the_same_groups(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = os.walk
    monkeypatch.setattr(
        "presage.pipelines.sources.raw_rows.os.walk",
        lambda *a, **k: ((d, f, sorted(n, reverse=True)) for d, f, n in walk(*a, **k)),
    )
    assert bytes_of(built(tmp_path)) == bytes_of(dataset)


@pytest.mark.slow
def test_a_second_build_into_the_dataset_keeps_its_groups(dataset: Path, tmp_path: Path) -> None:
    copy, job = copy_of(dataset, tmp_path / "dataset"), auto_job(tmp_path / "job")
    write_log(tmp_path / "log", 3000)
    build(request(job, tmp_path / "log", copy))
    assert bytes_of(copy) == bytes_of(dataset)
    write_log(tmp_path / "log", 3000, seed=5)
    with pytest.raises(SchemaError, match="output has other segments"):
        build(request(job, tmp_path / "log", copy))
    assert open_dataset(copy).job == open_dataset(dataset).job


@pytest.mark.slow
def test_groups_do_not_see_the_evaluation_range(tmp_path: Path, dataset: Path) -> None:
    rows = write_log(tmp_path / "log", 3000)
    moments = rows["time"].cast(pa.int64()).to_numpy()
    late = moments >= 1_767_225_600_000_000 + 480 * 1_000_000
    user = np.where(late, np.arange(3000), rows["user"].to_numpy())
    assert late.sum() > 30
    for file in (tmp_path / "log").iterdir():
        file.unlink()
    changed = rows.set_column(rows.column_names.index("user"), "user", pa.array(user))
    pq.write_table(changed, tmp_path / "log" / "log.parquet")
    build(request(auto_job(tmp_path / "job"), tmp_path / "log", tmp_path / "dataset"))
    assert open_dataset(tmp_path / "dataset").job == open_dataset(dataset).job


PER = """
name: plays
data:
  sources: {plays: {files: "*.parquet", format: parquet}}
  samples:
    per:
      key: session
      sql: SELECT session, time, user, history, clicked AS label,
                  count(*) OVER () AS num_plays, items[1] AS item FROM plays
  session: {key: session, time: time}
  groups: auto
  block_samples: 16
  tables:
    items: {features: [item, history], rows: identity, num_rows: 1000}
    users: {features: [user], rows: hash, num_rows: 65536}
  oracle: {batch_samples: 32}
train: {batch_samples: 32}
"""


@pytest.mark.slow
def test_job_with_sql_per_key_sees_whole_keys(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 3000)
    write_job(tmp_path)
    job = tmp_path / "job.yaml"
    job.write_text(PER)
    schema = (tmp_path / "schema.pbtxt").read_text().replace("num_history", "num_plays")
    schema = schema.replace('type: FLOAT annotation { tag: "dense" }', "type: INT ANN")
    (tmp_path / "schema.pbtxt").write_text(schema.replace("ANN", 'annotation { tag: "kept" }'))
    messages: list[str] = []
    asked = request(job, tmp_path / "log", tmp_path / "data", progress=messages.append)
    build(asked)
    groups = open_dataset(tmp_path / "data").job.data.groups
    assert groups == {"session": ("session", "user", "history", "num_plays")}
    assert messages[0] == "groups: auto: chosen from 3000 samples of 499 sessions:"


BAD_JOBS = {
    "a word that is not auto": (
        {"groups: auto": "groups: automatic"},
        "data.groups must be a mapping of keys, got 'automatic'",
    ),
    "a transform in a group that is not chosen yet": (
        {"transforms: {samples:": "transforms: {user:"},
        "transforms.user names a group, but groups is auto",
    ),
    "no sample in the training range": (
        {"2026-01-01 00:08:00": "1999-01-01"},
        "groups: auto found no samples in the training range",
    ),
    "an undeclared column": (
        {"clicked AS label": "clicked AS labels"},
        "column 'labels' must be declared in the schema",
    ),
}


@pytest.mark.parametrize("name", BAD_JOBS)
def test_bad_job_is_refused_with(name: str, tmp_path: Path) -> None:
    changes, message = BAD_JOBS[name]
    write_log(tmp_path / "log")
    job = auto_job(tmp_path / "job", **changes)
    with pytest.raises(SchemaError, match=re.escape(message)) as error:
        build(request(job, tmp_path / "log", tmp_path / "dataset"))
    assert "job.yaml" in str(error.value)
    assert not (tmp_path / "dataset").exists()


TEXTS = {
    "block": "name: a # b\ndata:\n    groups: auto # why\n    transforms:\n        samples:\n"
    "            made: len(history)\n            other: ln(item)\n    # end\ntrain: {}\n",
    "flow": '{"name": a, "data": {"groups": auto, transforms: {samples: {made: len(history), '
    'other: "ln(item)"}}, x: 1}}',
    "last line without an end": "data:\n  transforms: {samples: {made: len(history), "
    "other: ln(item)}}\n  groups: auto",
    "quoted": 'data:\n  groups: "auto"\n  transforms:\n    "samples": {made: len(history), '
    "other: 'ln(item)'}\nname: x\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_job_text_is_rewritten_in_place(name: str, repository: Path) -> None:
    shipped = load_job(repository / "schemas" / "mind" / "job.yaml").data
    data = dataclasses.replace(
        shipped,
        groups={"history": ("user id", "history", "yes", "a-b")},
        transforms={"history": {"made": "len(history)"}, "samples": {"other": "ln(item)"}},
    )
    text = TEXTS[name]
    result = rewritten(text, data, {"history": "for: {a} reason"})
    before, after = yaml.safe_load(text), yaml.safe_load(result)
    assert after["data"].pop("groups") == {"history": ["user id", "history", "yes", "a-b"]}
    assert after["data"].pop("transforms") == {k: dict(v) for k, v in data.transforms.items()}
    del before["data"]["groups"], before["data"]["transforms"]
    assert after == before
    assert all(comment in result for comment in re.findall("# (?:b|why|end)", text))


def test_named_groups_place_each_transform_where_all_its_inputs_are(tmp_path: Path) -> None:
    job = load_job(auto_job(tmp_path, **{"num_history: ln(1 + len(history))": (
        "both: user + item, alone: item + 1, none: 1 + 1, two: user + len(history)")}))  # fmt: skip
    named = named_groups(job, {"a": ("user",), "b": ("history",), "c": ("user_2", "x")})
    assert named.data.transforms == {
        "samples": {"both": "user + item", "alone": "item + 1", "none": "1 + 1",
                    "two": "user + len(history)"}}  # fmt: skip
    named = named_groups(job, {"a": ("user", "history")})
    assert named.data.transforms["a"] == {"two": "user + len(history)"}


def test_declared_transforms_follow_what_they_are_made_of(tmp_path: Path) -> None:
    job = load_job(auto_job(tmp_path, **{"num_history: ln(1 + len(history))": (
        "short: {last: {column: history, count: 3}}, num: len(short), "
        "pair: {cross: {columns: [item, short], num_rows: 9}}")}))  # fmt: skip
    named = named_groups(job, {"a": ("user",), "b": ("history",)})
    assert {g: list(transforms) for g, transforms in named.data.transforms.items()} == {
        "b": ["short", "num"], "samples": ["pair"]}  # fmt: skip
    (tmp_path / "named.yaml").write_text(rewritten(job_text(tmp_path), named.data, {}))
    assert load_job(tmp_path / "named.yaml").data == named.data


def job_text(directory: Path) -> str:
    return next(directory.rglob("job.yaml")).read_text()


@pytest.mark.slow
def test_columns_of_one_transform_stay_in_one_place(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 3000)
    transforms = (
        "{num_history: ln(1 + len(history)), pair: {cross: {columns: [user, item], num_rows: 99}}, "
        "of_pair: {clip: {column: pair, maximum: 50}}, short: {last: {column: history, count: 2}}}"
    )
    job = auto_job(tmp_path / "job", **{"{num_history: ln(1 + len(history))}": transforms})
    with (tmp_path / "job" / "schema.pbtxt").open("a") as file:
        for name, extra in {"pair": "", "of_pair": "", "short": "value_count { min: 0 } "}.items():
            file.write(
                f'feature {{ name: "{name}" type: INT {extra}annotation {{ tag: "kept" }} }}\n'
            )
    build(request(job, tmp_path / "log", tmp_path / "dataset"))
    data = open_dataset(tmp_path / "dataset").job.data
    assert data.group_of_column.get("user") == data.group_of_column.get("item")
    assert data.group_of_column["history"] == data.group_of_column["short"]
    place = data.group_of_column.get("user", "samples")
    assert {"pair", "of_pair"} <= {*data.transforms[place]}
    assert verify(tmp_path / "dataset")["problems"] == []


def test_columns_of_leaves_out_parameters_and_functions() -> None:
    text = 'list_transform(h, lambda x, y: x + y + z) || CAST(a.b AS TEXT) || coalesce("q r", 1)'
    assert columns_of(text) == {"h", "z", "b", "q r"}


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), min_size=1, max_size=60),
    st.integers(1, 80),
    st.randoms(use_true_random=False),
)
@example([(1, 0), (1, 0), (2, 0), (0, 0)], 4, Random(0))  # the second 1 is at the bound
def test_smallest_hashes_depend_on_the_rows_and_not_on_their_order(
    rows: list[tuple[int, int]], max_cells: int, random: object
) -> None:
    def kept(order: list[int], size: int) -> list[int]:
        smallest = SmallestHashes(max_cells)
        for start in range(0, len(order), size):
            part = order[start : start + size]
            table = pa.table(
                {
                    ORIGIN: pa.array(part, pa.int64()),
                    "x": pa.array([list(range(rows[i][1])) for i in part], pa.list_(pa.int64())),
                }
            )
            smallest.add(table, np.array([rows[i][0] for i in part], np.uint64))
        assert smallest.table is not None
        return sorted(smallest.table[ORIGIN].to_pylist())

    everything = list(range(len(rows)))
    expected = kept(everything, len(rows))
    mixed = everything.copy()
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert kept(mixed, 7) == kept(everything[::-1], 1) == expected
    cells = Counter[int]()
    for hashed, length in rows:
        cells[hashed] += 2 + length
    first = min(cells)
    if cells[first] <= max_cells:  # whole hashes, the smallest ones, as many as fit
        chosen: set[int] = set()
        for hashed in sorted(cells):
            if sum(cells[h] for h in chosen) + cells[hashed] > max_cells:
                break
            chosen.add(hashed)
        assert expected == [i for i, (hashed, _) in enumerate(rows) if hashed in chosen]
    else:
        assert {rows[i][0] for i in expected} == {first}


def keys(source: str, number: int, hashes: list[int], num_bytes: int = 10) -> KeysOfSplit:
    split = InputSplit(source, f"{number}.parquet", number)
    return KeysOfSplit(
        split, num_bytes, np.array(hashes, np.uint64), np.ones(len(hashes), np.int64)
    )


def test_keys_are_chosen_with_all_their_parts_until_the_bytes_are_spent() -> None:
    index = [
        keys("log", 0, [1, 2, 5]),
        keys("log", 1, [2, 3]),
        keys("log", 2, [4]),
        keys("users", 3, [1, 2, 3, 4, 5, 6]),
    ]
    chosen, splits = choose_keys(index, "log", max_bytes=30, max_rows=100)
    assert chosen.tolist() == [1, 2, 3, 5]  # 4 would need one more split; 6 has no sample
    assert [p.file_index for p in splits] == [0, 1, 3]


def test_the_first_key_is_chosen_whatever_it_takes() -> None:
    chosen, splits = choose_keys([keys("log", 0, [7, 9], 100)], "log", max_bytes=1, max_rows=0)
    assert chosen.tolist() == [7]
    assert len(splits) == 1


@pytest.mark.slow
def test_a_log_larger_than_what_is_read_gives_groups_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("presage.pipelines.autogroup.choose.INPUT_BYTES", 4_000)
    (columns,) = open_dataset(built(tmp_path)).job.data.groups.values()
    assert {"session", "user", "history"} <= {*columns}


@pytest.mark.slow
def test_a_log_with_one_huge_session_is_sampled_within_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def choose(rows: pa.Table, *others: Any) -> GroupChoice:
        seen.append(int(cells_of(rows).sum()))
        return choose_from(rows, *others)

    monkeypatch.setattr("presage.pipelines.autogroup.choose.MAX_CELLS", 200)
    monkeypatch.setattr("presage.pipelines.autogroup.choose.choose_from", choose)
    built(tmp_path)
    assert 100 < seen[0] < 300


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mind", "ebnerd"])
def test_chosen_groups_are_as_good_as_the_shipped_ones(
    name: str, shared_data: Path, repository: Path, tmp_path: Path
) -> None:
    result = {}
    auto = with_auto(repository / "schemas" / name / "job.yaml", tmp_path / "rewritten")
    build(request(auto, shared_data / real_logs.LOGS[name], tmp_path / "auto"))
    named, _ = real_logs.built(name, shared_data)
    for kind, dataset in {"auto": tmp_path / "auto", "named": named}.items():
        manifest = open_dataset(dataset).segments[0].manifest
        lookups = sum(t.num_lookups_dedup for t in manifest.tables.values())
        result[kind] = manifest.dataset_bytes, lookups
    assert result["auto"][0] <= result["named"][0] * 1.001  # names of groups differ in length
    assert result["auto"][1] <= result["named"][1]


SAMPLED_JOBS = {
    "map, two side tables": (test_executor.joined, 1 << 30),
    "map over per, side tables by key": (test_executor.joined_per, 1000),
    "map over per, side tables that every worker has": (test_executor.joined_per, 1 << 30),
    "labels as a log of their own": (test_executor.events, 1 << 30),
    "sampled, with rejects": (test_executor.shop, 1 << 30),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED_JOBS)
def test_groups_are_chosen_from_the_samples_that_a_build_makes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all of the input is read, the sample is the training range of the build."""
    write, broadcast = SAMPLED_JOBS[name]
    monkeypatch.setattr(lookups, "BROADCAST_BYTES", broadcast)
    monkeypatch.setattr("presage.pipelines.prepare.PART_INPUT_BYTES", 4_000)  # several parts
    path = write(tmp_path)
    job = load_job(path)
    transforms = {
        n: t for transforms in job.data.transforms.values() for n, t in transforms.items()
    }
    data = dataclasses.replace(job.data, groups={}, transforms={"samples": transforms})
    asked = request(path, tmp_path / "input", tmp_path / "dataset")
    ungrouped = dataclasses.replace(job, data=data)
    context = prepare(asked, dataclasses.replace(load_job_files(path), config=ungrouped))
    sample, _ = sample_sessions(
        dataclasses.replace(context, segment_root=Location.parse(tmp_path / "scratch"))
    )
    assert sample is not None
    build(asked)
    rows = stored_table(tmp_path / "dataset")
    if data.split.evaluation_from is not None:
        end = pa.scalar(data.split.evaluation_from, pa.timestamp("us"))
        rows = rows.filter(pa.array([t < end.as_py() for t in rows[data.session.time].to_pylist()]))
    assert rows.num_rows
    columns = [n for n in rows.column_names if n in sample.rows.column_names]
    assert sorted(map(str, sample.rows.select(columns).to_pylist())) == sorted(
        map(str, rows.select(columns).to_pylist())
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["map over per, side tables by key", "labels as a log of their own"]
)
def test_auto_groups_of_a_job_with_several_steps_build(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, broadcast = SAMPLED_JOBS[name]
    monkeypatch.setattr(lookups, "BROADCAST_BYTES", broadcast)
    path = write(tmp_path)
    asked = request(
        with_auto(path, tmp_path / "rewritten"), tmp_path / "input", tmp_path / "dataset"
    )
    build(asked)
    assert verify(tmp_path / "dataset")["problems"] == []
    assert not open_dataset(tmp_path / "dataset").job.data.has_auto_groups
