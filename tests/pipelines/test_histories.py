"""Histories of days against lists that are made by brute force from the raw rows."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchLoader

from presage import DataLoader
from presage.batch import Batch
from presage.pipelines.build import build
from presage.pipelines.cli import main
from presage.pipelines.histories.causality import find_leaks, find_stale
from presage.pipelines.histories.event_files import PartEvents
from presage.pipelines.histories.event_rows import AVAILABLE, KEY, ORDER
from presage.pipelines.histories.stored_events import num_events_of
from presage.pipelines.sources.raw_rows import ORIGIN
from presage.pipelines.table.verify import verify
from presage.schemas.dataset.manifest import HistoryCounts
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from tests.pipelines.appending import addition
from tests.pipelines.history_days import (
    FIRST,
    Days,
    build_days,
    write_days,
)
from tests.pipelines.logs import IN_PROCESS, ON_BEAM, PROCESSES, bytes_of, copy_of, request
from tests.trainer.test_reader import mapped_files


def expected_lists(
    days: Days, events: Sequence[pa.Table], delay: int
) -> dict[int, list[tuple[int, int]]]:
    """Return the (item, time) of the events that each sample sees, by its id.

    An event is filed in the first day whose end it is available before, of those that may have it.
    """
    seen: dict[int, list[tuple[int, int]]] = {}
    earlier: dict[object, list[tuple[int, int]]] = {}
    filed: list[list[dict]] = [[] for _ in events]
    for day, of_day in enumerate(events):
        for row in of_day.set_column(1, "time", of_day["time"].cast(pa.int64())).to_pylist():
            row["time"] += row["item"] % 7 * delay * 1_000_000
            place = max(day, row["time"] // 86_400_000_000 - (FIRST - date(1970, 1, 1)).days)
            if place < len(filed):
                filed[place].append(row)
    for log, own in zip(days.log, filed, strict=True):
        key = (lambda r: (r["time"], r["id"])) if days.before == "order" else (lambda r: r["time"])
        own.sort(key=key)  # stable: rows keep their order
        for sample in log.set_column(1, "time", log["time"].cast(pa.int64())).to_pylist():
            visible = [
                (row["item"], row["time"])
                for row in own
                if row["user"] == sample["user"] and key(row) < key(sample)
            ]
            seen[sample["id"]] = earlier.get(sample["user"], []) + visible
        for row in own:
            earlier.setdefault(row["user"], []).append((row["item"], row["time"]))
    return seen


def lists_of(loader: Iterable[Batch], name: str, second: int) -> dict[int, list[tuple[int, int]]]:
    """Return the (item, time) of the events that each sample sees, by its id."""
    found: dict[int, list[tuple[int, int]]] = {}
    for batch in loader:
        history = batch.histories[name]
        items, ticks = history.values["item"].tolist(), (history.ticks * second).tolist()
        events = list(zip(items, ticks, strict=True))
        ranges = zip(
            batch.kept["id"].tolist(), history.starts.tolist(), history.ends.tolist(), strict=True
        )
        for index, (sample, start, end) in enumerate(ranges):
            if index < batch.num_samples:
                found[sample] = events[start:end]
        runs = history.runs.tolist()
        assert (runs[0], runs[-1]) == (0, len(events))
        assert runs == sorted(runs)
        plain = history.materialize(["item"])
        assert plain["item"].lengths().tolist() == history.lengths.tolist()
        if "kind" in history.values:
            assert (history.values["kind"] == history.values["item"] % 3).all()
    return found


@pytest.fixture(scope="module", params=[("time", 0), ("order", 9000), ("time", 17_000)])
def days(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Days:
    """Three days with either rule; keys are texts in a group, or numbers."""
    folder = tmp_path_factory.mktemp("days") / "log"
    before, delay = request.param
    texts = before == "order"
    days = write_days(folder, num_days=4, before=before, texts=texts, delay=delay, seed=5)
    build_days(days, days.dataset)
    return days


def cut(
    lists: Mapping[int, list[tuple[int, int]]], count: int | None
) -> dict[int, list[tuple[int, int]]]:
    """Return the newest of the events."""
    return {sample: each[-count:] if count else each for sample, each in lists.items()}


@pytest.mark.parametrize("count", [None, 1, 3, 40])
def test_samples_see_the_events_before_them(days: Days, count: int | None) -> None:
    played = [t.filter(pa.array([i % 5 != 0 for i in t["item"].to_pylist()])) for t in days.plays]
    wanted = expected_lists(days, played, days.delay)
    floor = {s: [(i, t // 5_000_000 * 5_000_000) for i, t in each] for s, each in wanted.items()}
    keep = ["id", "user", "time"]
    loader = DataLoader(days.dataset, batch_samples=32, keep=keep, histories={"plays": count})
    assert lists_of(loader, "plays", 5_000_000) == cut(floor, count)
    loader = DataLoader(
        days.dataset, batch_samples=32, keep=keep, histories={"shown": count}, shuffle=True, seed=3
    )
    floor = {
        s: [(i, t // 1_000_000 * 1_000_000) for i, t in each]
        for s, each in expected_lists(days, days.log, 0).items()
    }
    assert lists_of(loader, "shown", 1_000_000) == cut(floor, count)


def test_verify_finds_nothing_wrong(days: Days) -> None:
    assert verify(days.dataset)["problems"] == []
    counts = [segment.manifest.histories for segment in open_dataset(days.dataset).segments]
    assert [c["shown"].num_events for c in counts] == [table.num_rows for table in days.log]
    assert any(c["plays"].num_pending > 0 for c in counts) == (days.delay > 0)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[ON_BEAM], PROCESSES], ids=["beam", "processes"])
def test_every_runner_writes_the_same_days(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("presage.pipelines.prepare.PART_INPUT_BYTES", 4_000)
    days = write_days(tmp_path / "log", num_days=2, before="time", texts=True, delay=9_000, seed=2)
    build_days(days, tmp_path / "here")
    build_days(days, tmp_path / "there", options)
    assert bytes_of(tmp_path / "there") == bytes_of(tmp_path / "here")
    assert open_dataset(tmp_path / "here").segments[0].manifest.num_parts > 2


def test_day_that_is_built_again_makes_the_next_one_stale(days: Days, tmp_path: Path) -> None:
    dataset = copy_of(days.dataset, tmp_path / "dataset")
    other = write_days(
        tmp_path / "log", num_days=1, before=days.before, texts=days.before == "order",
        delay=days.delay, seed=77,
    )  # fmt: skip
    build(addition(days.job, other.folder(0), dataset, day=FIRST.isoformat(), replaces=True))
    second = open_dataset(dataset).segments[1].id
    stale = (
        f"history 'plays': segment {second} has the pending events of another version of the "
        "segment before it; build it again"
    )
    assert verify(dataset)["problems"] == ([stale] if days.delay else [])  # else none is pending


def test_sample_before_its_day_is_a_reject(tmp_path: Path) -> None:
    days = write_days(tmp_path / "log", num_days=2, before="time", texts=False, delay=0, seed=1)
    early = days.log[0].slice(0, 3)
    pq.write_table(early, days.folder(1) / "log-2.parquet")
    build_days(days, days.dataset)
    manifest = open_dataset(days.dataset).segments[1].manifest
    assert (manifest.num_rejects, manifest.num_samples) == (3, days.log[1].num_rows)
    assert verify(days.dataset)["problems"] == []


def test_segment_whose_samples_would_see_later_events_is_refused(tmp_path: Path) -> None:
    days = write_days(tmp_path / "log", num_days=2, before="time", texts=False, delay=0, seed=1)
    build(request(days.job, days.folder(1), days.dataset))
    with pytest.raises(SchemaError, match=r"that is built has a sample at .* build segments of"):
        build(addition(days.job, days.folder(0), days.dataset))
    assert len(open_dataset(days.dataset).segments) == 1


def test_erased_key_leaves_no_event_and_others_see_what_they_saw(
    days: Days, tmp_path: Path
) -> None:
    dataset = copy_of(days.dataset, tmp_path / "dataset")
    gone = "user 3" if days.before == "order" else "3"
    (tmp_path / "ids").write_text(f"{gone}\n")
    words = [
        "erase",
        str(dataset),
        "--ids",
        str(tmp_path / "ids"),
        "--rewrite",
        "--json",
        IN_PROCESS,
    ]
    assert main(words) == 0
    assert verify(dataset)["problems"] == []
    opened = open_dataset(dataset)
    for segment in opened.segments:
        assert set(num_events_of(segment, {gone}).values()) == {0}
    left = {row["id"] for log in days.log for row in log.to_pylist() if str(row["user"]) != gone}
    loaders = [
        DataLoader(path, batch_samples=32, keep=["id"], histories={"plays": None})
        for path in (days.dataset, dataset)
    ]
    before, after = (lists_of(loader, "plays", 5_000_000) for loader in loaders)
    assert after == {sample: lists for sample, lists in before.items() if sample in left}
    with pytest.raises(SystemExit, match="1"):
        sys.exit(main([*words, "--column", "item"]))


@pytest.mark.parametrize("shift", [1, -1])
def test_verify_finds_planted_leaks(
    shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = write_days(tmp_path / "log", num_days=1, before="time", texts=False, delay=0, seed=1)
    counts = PartEvents.counts
    monkeypatch.setattr(
        PartEvents, "counts", lambda *given: np.maximum(counts(*given) + np.int32(shift), 0)
    )
    build_days(days, days.dataset)
    found = verify(days.dataset)["problems"]
    assert found
    assert all("see later events of history" in line for line in found)


EVENT = st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(-2, 2))


@given(
    events=st.lists(EVENT, max_size=25),
    samples=st.lists(EVENT, max_size=12),
    by_order=st.booleans(),
    end=st.one_of(st.none(), st.integers(0, 7)),
)
def test_counts_are_those_of_a_walk_over_the_events(
    events: list[tuple[int, int, int]],
    samples: list[tuple[int, int, int]],
    by_order: bool,
    end: int | None,
) -> None:
    key, available, order = (
        (np.array(c, np.int64) for c in zip(*events, strict=True))
        if events
        else np.zeros((3, 0), np.int64)
    )
    rows = {KEY: key, AVAILABLE: available, ORDER: order, ORIGIN: np.arange(len(key)), "item": key}
    part = PartEvents([pa.table(rows)], end)
    own = [each for each in events if end is None or each[1] < end]
    assert (len(part.available), part.pending.num_rows) == (len(own), len(events) - len(own))
    expected = [
        sum(
            e[0] == s[0] and (e[1] < s[1] or (by_order and (e[1], e[2]) < (s[1], s[2])))
            for e in own
        )
        for s in samples
    ]
    wanted = np.array(samples, np.int64).reshape(-1, 3).T
    found = part.counts(pa.array(wanted[0]), wanted[1], wanted[2] if by_order else None)
    assert found.tolist() == expected
    for start, stop in itertools.pairwise(part.starts.tolist()):
        pairs = list(zip(part.available[start:stop], part.order[start:stop], strict=True))
        assert pairs == sorted(pairs)


def test_segments_are_compared_with_those_before_them() -> None:
    counts = HistoryCounts(
        num_events=1, num_keys=1, first=5, last=5, num_bytes=1, first_sample=3,
        pending_sha256="a" * 64,
    )  # fmt: skip
    later = replace(counts, first=8, last=8, first_sample=6, taken_sha256="a" * 64)

    def leaks(*of_segments: HistoryCounts) -> list[str]:
        named = [
            (f"{i}", SimpleNamespace(histories={"plays": c})) for i, c in enumerate(of_segments)
        ]
        stale = [line for _, line in find_stale(named)]  # type: ignore[arg-type]
        return [*find_leaks(named), *stale]  # type: ignore[arg-type]

    assert leaks(counts, later) == []
    assert (
        "sample at 1970-01-01 00:00:00.000005, but segment 0"
        in leaks(counts, replace(later, first_sample=5))[0]
    )
    assert (
        "pending events of another version" in leaks(counts, replace(later, taken_sha256=None))[0]
    )
    assert leaks(replace(counts, num_events=0, last=0), replace(later, first_sample=0)) == []


def test_ranks_and_worker_processes_see_what_one_process_does(days: Days) -> None:
    options = {"batch_samples": 32, "keep": ["id"], "histories": {"plays": 7}}
    alone = lists_of(DataLoader(days.dataset, **options), "plays", 5_000_000)
    together: dict[int, list[tuple[int, int]]] = {}
    for rank in range(3):
        loader = DataLoader(
            days.dataset, rank=rank, world_size=3, equal_batches=True, deduplicated=False, **options
        )
        together |= lists_of(loader, "plays", 5_000_000)
    assert together == alone
    workers = TorchLoader(DataLoader(days.dataset, **options), batch_size=None, num_workers=2)
    assert lists_of(workers, "plays", 5_000_000) == alone  # type: ignore[arg-type]


def test_rows_that_cannot_be_events_are_rejects(tmp_path: Path) -> None:
    days = write_days(tmp_path / "log", num_days=1, before="time", texts=False, delay=0, seed=4)
    schema = days.plays[0].schema
    log = days.log[0].set_column(0, "user", days.log[0]["user"].cast(pa.int32()))
    for name in ("log-0", "log-1"):
        (days.folder(0) / f"{name}.parquet").unlink()
    pq.write_table(log, days.folder(0) / "log-0.parquet")
    good = {"user": 1, "time": days.plays[0]["time"][0].as_py(), "id": 1, "item": 2, "label": 0}
    bad = [good | {"user": 1 << 40}, good | {"user": None}, good | {"time": None}]
    bad += [good | {"item": 1001}, good | {"item": -4}, good | {"item": None}]
    pq.write_table(pa.Table.from_pylist(bad, schema), days.folder(0) / "plays-2.parquet")
    build_days(days, days.dataset)
    (segment,) = open_dataset(days.dataset).segments
    assert verify(days.dataset)["problems"] == []
    (path,) = (path for path in segment.files if path.startswith("rejects/"))
    rejects = segment.file(path).read()
    assert rejects["position"].to_pylist() == [0, 1, 2, 3, 4]  # `where` leaves out a null item
    assert [reason.split(":")[0] for reason in rejects["reason"].to_pylist()][1:] == [
        "history 'plays'"
    ] * 4
    assert "INT32" in rejects["reason"][0].as_py()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("kind: item % 3", "kind: CAST(item AS TEXT)"),
            r"kind must be a number, as the ids of table 'kinds', got .*; cast it",
        ),
        (
            ("tables: {item: items, kind: kinds}", "tables: {item: items}"),
            r"tables\.kinds has no features, and no history looks it up",
        ),
        (
            ("{item: item, kind", "{item: item / 2, kind"),
            r"item must be an id, got double in .*; cast",
        ),
        (
            ("columns: {item: item}", "columns: {item: item, text: CAST(item AS TEXT)}"),
            r"text is text without a table in .*; name its",
        ),
        (("available: time +", "available: item +"), r"Binder Error"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    change: tuple[str, str], message: str, tmp_path: Path
) -> None:
    days = write_days(tmp_path / "log", num_days=1, before="time", texts=False, delay=0, seed=4)
    text = days.job.read_text()
    assert change[0] in text
    days.job.write_text(text.replace(*change))
    with pytest.raises(SchemaError, match=message):
        build_days(days, days.dataset)


def test_reader_keeps_few_files_of_many_days_open(
    days: Days, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = copy_of(days.dataset, tmp_path / "dataset")  # not that of other tests' readers
    monkeypatch.setattr("presage.schemas.dataset.history_files.OPEN_FILES", 2)
    options = {"batch_samples": 32, "keep": ["id"], "histories": {"plays": None}}
    most = 0
    for _ in DataLoader(dataset, read_ahead=1, **options):
        paths = {path for path in mapped_files(dataset) if "/histories/" in path}
        most = max(most, len(paths))
    assert 0 < most <= 2
