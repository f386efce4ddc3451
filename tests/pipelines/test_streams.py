# ruff: noqa: E501 - a table of faults, one a line
"""Join of features and events: each feature with its event; late and unmatched events are kept."""

import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.pipelines.build import build
from presage.pipelines.samples.event_join import COUNTS, join_events
from presage.pipelines.table.verify import verify
from presage.schemas.config.job import load_job
from presage.schemas.dataset.manifest import InputFile
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from tests.pipelines.logs import bytes_of, request, stored_table

JOB = """
name: ads
data:
  sources:
    shown: {files: "shown/*.parquet", format: parquet}
    clicks: {files: "clicks/*.jsonl", format: jsonl, columns: {request: string, session: int64, at: timestamp, clicked: int8, dwell: float32}}
  samples:
    source: shown
    events:
      source: clicks
      key: [request]
      shard: session
      time: time
      event_time: at
      label_wait: 60s
      columns: {clicked: 0, dwell: null}
      label_time: label_time
    map: SELECT session, time, request, user, clicked AS label, dwell, label_time FROM shown
  session: {key: session, time: time}
  groups: {user: [session, user]}
  block_samples: 16
  tables: {users: {features: [user], num_rows: 100}}
  oracle: {batch_samples: 32}
train: {batch_samples: 32}
"""
SCHEMA = """
feature { name: "session" type: INT annotation { tag: "kept" } }
feature { name: "time" type: INT annotation { tag: "kept" } }
feature { name: "request" type: BYTES annotation { tag: "kept" } }
feature { name: "user" type: INT annotation { tag: "sparse" } }
feature { name: "label" type: INT annotation { tag: "label" } int_domain { min: 0 max: 1 } }
feature { name: "dwell" type: FLOAT annotation { tag: "dense" } }
feature { name: "label_time" type: INT annotation { tag: "label_time" } }
"""
START = 1_767_225_600
Feature = tuple[int, int, str]  # session, second, request
Event = tuple[int, int, str, int]  # session, second, request, clicked


def clock(second: int) -> str:
    return f"2026-01-01T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}Z"


def write(root: Path, features: list[Feature], events: list[Event], files: int = 2) -> None:
    (root / "shown").mkdir(parents=True)
    (root / "clicks").mkdir()
    for i in range(files):
        part = features[i::files]
        table = pa.table(
            {
                "session": pa.array([s for s, _, _ in part], pa.int32()),
                "time": pa.array([(START + t) * 1000 for _, t, _ in part], pa.timestamp("ms")),
                "request": pa.array([r for _, _, r in part], pa.string()),
                "user": pa.array([s % 7 for s, _, _ in part], pa.int64()),
            }
        )
        pq.write_table(table, root / "shown" / f"{i}.parquet", row_group_size=20)
        lines = [
            f'{{"request": "{r}", "session": {s}, "at": "{clock(t)}", "clicked": {c}, "dwell": {t}}}'
            for s, t, r, c in events[i::files]
        ]
        (root / "clicks" / f"{i}.jsonl").write_text("\n".join(lines) + "\n")


def reference(
    features: list[Feature], events: list[Event], rule: str = "first", wait: int = 60
) -> tuple[list[tuple[Any, ...]], Counter[str]]:
    """The join by plain Python: each feature with all events."""
    samples, used, counts = [], set(), Counter()
    for session, second, name in features:
        mine = [e for e in events if (e[0], e[2]) == (session, name)]
        in_time = sorted(e[1] for e in mine if e[1] - second <= wait)
        used.update(e for e in mine if e[1] - second <= wait)
        counts["duplicates"] += max(0, len(in_time) - 1)
        chosen = None if not in_time else in_time[-1 if rule == "last" else 0]
        event = next((e for e in mine if e[1] == chosen), None)
        clicked = event[3] if event else 0
        dwell = chosen
        if rule == "any" and event:
            clicked = max(e[3] for e in mine if e[1] - second <= wait)
            dwell = in_time[-1]
        counts["without_event"] += event is None
        samples.append((session, second, name, clicked, dwell, chosen))
    known = {(s, r) for s, _, r in features}
    counts["late"] = sum((e[0], e[2]) in known and e not in used for e in events)
    counts["unmatched"] = sum((e[0], e[2]) not in known for e in events)
    counts["features"], counts["events"] = len(features), len(events)
    return sorted(samples, key=str), counts


def seconds(time: datetime | None) -> int | None:
    return None if time is None else int(time.replace(tzinfo=UTC).timestamp()) - START


def samples_of(dataset: Path) -> list[tuple[Any, ...]]:
    result = []
    for r in stored_table(dataset).to_pylist():
        second, at = seconds(r["time"]), seconds(r["label_time"])
        dwell = None if r["dwell"] is None else int(r["dwell"])
        result.append((r["session"], second, r["request"], r["label"], dwell, at))
    return sorted(result, key=str)


def job_of(directory: Path, **changes: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    text = JOB
    for key, value in changes.items():
        text = text.replace(
            "      label_wait: 60s\n", f"      label_wait: 60s\n      {key}: {value}\n"
        )
    (directory / "job.yaml").write_text(text)
    (directory / "schema.pbtxt").write_text(SCHEMA)
    return directory / "job.yaml"


def some_log(seed: int = 3) -> tuple[list[Feature], list[Event]]:
    rng = np.random.default_rng(seed)
    features = [
        (int(rng.integers(-20, 20)), int(rng.integers(0, 3000)), f"r{i}") for i in range(200)
    ]
    events = []
    for i in rng.choice(200, 120):
        session, second, name = features[i]
        events.append((session, second + int(rng.integers(-5, 110)), name, int(rng.integers(0, 2))))
    events += [
        (int(rng.integers(-20, 20)), int(rng.integers(0, 3000)), f"x{i}", 1) for i in range(15)
    ]
    seen: set[tuple[int, int, str]] = set()
    unique = [e for e in events if not (e[:3] in seen or seen.add(e[:3]))]
    return features, sorted(unique, key=lambda e: e[1])


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["first", "last", "any"])
def test_join_gives_what_each_feature_with_all_events_gives(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("presage.pipelines.prepare.PART_INPUT_BYTES", 4000)  # several parts
    features, events = some_log()
    write(tmp_path / "input", features, events)
    result = build(
        request(job_of(tmp_path / "job", duplicates=rule), tmp_path / "input", tmp_path / "d")
    )
    samples, counts = reference(features, events, rule)
    assert samples_of(tmp_path / "d") == samples
    assert result["events"] == dict(counts)
    assert min(counts.values()) > 0
    (segment,) = open_dataset(tmp_path / "d").segments
    late = [
        r
        for p in segment.files
        if p.startswith("late/")
        for r in segment.file(p).read().to_pylist()
    ]
    reasons = Counter(r["reason"] for r in late)
    assert reasons == {
        "event must come at most 0:01:00 after its features": counts["late"],
        "event has no features with its key": counts["unmatched"],
    }
    lines = {(f"clicks/{i}.jsonl", p): e for i in range(2) for p, e in enumerate(events[i::2])}
    assert all(lines[r["file"], r["position"]][2] in r["value"] for r in late)
    assert verify(tmp_path / "d")["problems"] == []


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_shard_or_on_the_order_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, events = some_log()
    write(tmp_path / "input", features, events)
    job = job_of(tmp_path / "job")
    build(request(job, tmp_path / "input", tmp_path / "by session"))
    job.write_text(job.read_text().replace("      shard: session\n", ""))
    monkeypatch.setattr("presage.pipelines.prepare.PART_INPUT_BYTES", 1 << 20)
    build(request(job, tmp_path / "input", tmp_path / "by request"))
    result = {}
    for name in ("by session", "by request"):
        files = bytes_of(tmp_path / name)
        result[name] = {
            p.split("/", 2)[2]: b
            for p, b in files.items()
            if re.search("/(samples|groups|late|access)/", p)
        }
    assert result["by session"] == result["by request"]


def test_features_without_an_event_are_dropped_when_the_job_says_so(tmp_path: Path) -> None:
    features, events = some_log()
    write(tmp_path / "input", features, events)
    job = job_of(tmp_path / "job", without_event="drop")
    build(request(job, tmp_path / "input", tmp_path / "d"))
    samples, _ = reference(features, events)
    kept = [s for s in samples if s[5] is not None]
    assert samples_of(tmp_path / "d") == kept


def test_events_under_per_see_the_joined_rows(tmp_path: Path) -> None:
    features, events = some_log()
    write(tmp_path / "input", features, events)
    job = job_of(tmp_path / "job")
    per = """per:
      key: session
      sql: SELECT *, (sum(clicked) OVER (ORDER BY time, _origin))::BIGINT AS clicks FROM shown
    map: SELECT session, time, request, user, (clicks > 0)::TINYINT AS label, dwell, label_time FROM per"""
    job.write_text(re.sub(r"map: SELECT .* FROM shown", per, job.read_text()))
    build(request(job, tmp_path / "input", tmp_path / "d"))
    samples, _ = reference(features, events)
    first: dict[int, int] = {}
    for session, second, _, clicked, _, _ in samples:
        if clicked:
            first[session] = min(second, first.get(session, second))
    result = samples_of(tmp_path / "d")
    wrong = [s for s in result if s[3] != (s[1] >= first.get(s[0], 1 << 60))]
    assert wrong == []


BAD_EVENTS: dict[str, tuple[str, str]] = {
    "a null key": ('{"session": 1, "at": "2026-01-01", "clicked": 1}', "key 'request' must not be null"),
    "a null shard": ('{"request": "r1", "at": "2026-01-01"}', "key 'session' must not be null"),
    "a null time": ('{"request": "r1", "session": 1}', "event time 'at' must not be null"),
    "no object": ("r1", "line must be one JSON object, from { to }"),
    "a text for a number": ('{"request": "r1", "clicked": "x"}', "field 'clicked' must be int8, got 'x'"),
}  # fmt: skip


@pytest.mark.parametrize(("line", "reason"), BAD_EVENTS.values(), ids=BAD_EVENTS)
def test_bad_event_is_a_reject_and_the_others_count(line: str, reason: str, tmp_path: Path) -> None:
    features, events = some_log()
    write(tmp_path / "input", features, events)
    (tmp_path / "input" / "clicks" / "9.jsonl").write_text(f"\n{line}\n")
    result = build(request(job_of(tmp_path / "job"), tmp_path / "input", tmp_path / "d"))
    rejects = pq.read_table(next((tmp_path / "d").rglob("rejects/*.parquet"))).to_pylist()
    assert [(r["file"], r["position"], r["reason"]) for r in rejects] == [
        ("clicks/9.jsonl", 1, reason)
    ]
    assert result["events"]["events"] == len(events)


WRONG: dict[str, tuple[str, str, str]] = {
    "an unknown source": ("source: clicks", "source: click", "samples.events.source must be a source, got 'click'"),
    "the features themselves": ("source: clicks", "source: shown", "samples.events.source must be another source, got 'shown'"),
    "a key that the events lack": ("key: [request]", "key: [user]", "data.samples.events.key must be a column of both logs, got 'user'"),
    "no key": ("key: [request]", "key: []", "data.samples.events.key is empty"),
    "a time that is none": ("event_time: at", "event_time: dwell", "data.samples.events.event_time must be a timestamp, got float for 'dwell'"),
    "a column that the features have": ("{clicked: 0, dwell: null}", "{session: 0}", "data.samples.events must add new columns, got 'session'"),
    "half a click": ("{clicked: 0,", "{clicked: 0.5,", "data.samples.events.columns.clicked must be int8 or null, got 0.5"),
    "the largest text": ("{clicked: 0, dwell: null}", "{at: null}\n      duplicates: any\n      without_event: sometimes", "data.samples.events.without_event must be one of keep, drop"),
    "no wait": ("      label_wait: 60s\n", "", "missing key: data.samples.events.label_wait in "),
    "per of another key": ("    map: SELECT", "    per: {key: request, sql: SELECT * FROM shown}\n    map: SELECT", "samples.per.key must be the shard of the events, got 'request' and 'session'"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), WRONG.values(), ids=WRONG)
def test_wrong_events_are_refused_before_the_work(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    write(tmp_path / "input", *some_log())
    assert old in JOB
    job = job_of(tmp_path / "job")
    job.write_text(JOB.replace(old, new, 1))
    with pytest.raises(SchemaError, match=re.escape(message)):
        build(request(job, tmp_path / "input", tmp_path / "d"))


def as_tables(features: list[Feature], events: list[Event]) -> dict[str, pa.Table]:
    shown = {
        "session": [s for s, _, _ in features],
        "time": pa.array([t * 1_000_000 for _, t, _ in features], pa.timestamp("us")),
        "request": [r for _, _, r in features],
        "_origin": pa.array(range(len(features)), pa.int64()),
    }
    clicks = {
        "session": [e[0] for e in events],
        "at": pa.array([e[1] * 1_000_000 for e in events], pa.timestamp("us")),
        "request": [e[2] for e in events],
        "clicked": pa.array([e[3] for e in events], pa.int8()),
        "dwell": pa.array([e[1] for e in events], pa.float32()),
        "_origin": pa.array(range(len(events)), pa.int64()),
    }
    kinds = {"session": pa.int64(), "request": pa.string()}
    tables = [
        {n: pa.array(c, kinds[n]) if n in kinds else c for n, c in t.items()}
        for t in (shown, clicks)
    ]
    return {"shown": pa.table(tables[0]), "clicks": pa.table(tables[1])}


@pytest.mark.slow
@given(
    features=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 200), st.sampled_from("ab")), max_size=12
    ),
    events=st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(0, 300), st.sampled_from("abc"), st.integers(0, 1)
        ),
        max_size=12,
        unique_by=lambda e: e[:3],
    ),
    rule=st.sampled_from(["first", "last", "any"]),
)
def test_any_two_logs_join_as_by_plain_python(
    features: list[Feature], events: list[Event], rule: str
) -> None:
    with TemporaryDirectory() as directory:
        data = load_job(job_of(Path(directory), duplicates=rule)).data
    listing = [InputFile(source="clicks", path="c", num_bytes=0, sha256="")]
    joined = join_events(as_tables(features, events), data, listing)
    samples, counts = reference(features, events, rule)
    rows = joined.tables["shown"].to_pylist()
    result = [
        (
            r["session"],
            int(r["time"].replace(tzinfo=UTC).timestamp()),
            r["request"],
            r["clicked"],
            r["dwell"],
            None
            if r["label_time"] is None
            else int(r["label_time"].replace(tzinfo=UTC).timestamp()),
        )
        for r in rows
    ]
    assert sorted(result, key=str) == sorted(
        [(s, t, r, c, None if d is None else float(d), a) for s, t, r, c, d, a in samples], key=str
    )
    assert {n: joined.counts[n] for n in COUNTS} == {n: counts[n] for n in COUNTS}
    assert len(joined.unused_events) == counts["late"] + counts["unmatched"]
