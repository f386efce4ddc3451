"""Samples through the shuffle of a runner: nothing lost, the same bytes stored."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.coders.typecoders import registry
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
from hypothesis import given
from hypothesis import strategies as st

from presage.pipelines.beam.grouping import Destinations, SendSamples
from presage.pipelines.cli import main
from presage.pipelines.samples.tuples import (
    Tuples,
    hash_session_keys,
    separate_tuples,
)
from presage.pipelines.shuffle import (
    ReceivedSamples,
    check_same_order,
    elements_of,
    encode_by_target,
    from_ipc,
)
from presage.schemas.config.job import load_job
from presage.schemas.hashing import partition_of_key
from tests.pipelines.logs import PROCESSES, bytes_of, write_job, write_log
from tests.shared import error_of


def test_messages_that_come_in_another_order_again_are_refused() -> None:
    seen: list[bytes] = []
    assert list(check_same_order([b"a", b"b"], seen)) == list(check_same_order([b"a", b"b"], seen))
    message = "the runner changed the order of samples between reads; try again"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        list(check_same_order([b"b", b"a"], seen))


def chunk(seed: int, num_rows: int = 50) -> pa.Table:
    rng = np.random.default_rng(seed)
    users = rng.integers(0, 9, num_rows)
    columns = {
        "user": pa.array(users),
        "history": pa.array([list(range(u)) for u in users.tolist()], pa.large_list(pa.int64())),
        "label": pa.array(rng.integers(0, 2, num_rows)),
    }
    return pa.table(columns)


def expanded(samples: Tuples) -> pa.Table:
    columns = {name: samples.column(name) for name in ("user", "history", "label")}
    return pa.table(columns)


def test_samples_in_elements_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("presage.pipelines.shuffle.ELEMENT_BYTES", 1_500)
    groups = {"user": ("user", "history")}
    coder = registry.get_coder(Tuples)
    chunks = [separate_tuples(chunk(seed, 4000), groups) for seed in range(3)]
    elements = [e for each in chunks for e in elements_of(coder.decode(coder.encode(each)))]
    assert len(elements) > len(chunks)
    assert all(len(element) <= 1_500 for element in elements)
    received = ReceivedSamples(elements)
    found = [expanded(t) for t in received]
    assert [expanded(t) for t in received] == found  # gone through again
    assert pa.concat_tables(found) == pa.concat_tables([expanded(t) for t in chunks])


def test_a_single_sample_is_an_element_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("presage.pipelines.shuffle.ELEMENT_BYTES", 10)
    assert len(list(elements_of(separate_tuples(chunk(0), {})))) == 50


def test_raw_rows_of_each_target_cross_in_elements_that_are_not_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("presage.pipelines.shuffle.ELEMENT_BYTES", 2_000)
    values = np.random.default_rng(0).integers(0, 1 << 62, 900)
    found: dict[int, list[int]] = {}
    for part, content in encode_by_target(pa.table({"x": pa.array(values)}), np.arange(900) % 2):
        assert len(content) <= 2_000
        found.setdefault(part, []).extend(from_ipc(content)["x"].to_pylist())
    assert found == {0: values[::2].tolist(), 1: values[1::2].tolist()}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("log")
    write_log(directory / "log", num_rows=600, num_files=4)
    write_job(directory / "job")
    return directory


def dataset_of(log: Path, name: str, options: list[str]) -> dict[str, bytes]:
    words = ["build", str(log / "job" / "job.yaml"), "--input", str(log / "log")]
    assert main([*words, "--output", str(log / name), *options]) == 0
    return bytes_of(log / name)


@pytest.mark.slow
def test_builds_on_beam_with_any_workers_and_levels_give_the_same_bytes(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("presage.pipelines.prepare.PART_INPUT_BYTES", 4_000)
    for module in ("clustering.part", "beam.build_parts"):
        monkeypatch.setattr(f"presage.pipelines.{module}.PARTS_PER_SUM", 3)
    default = dataset_of(log, "default", [])
    beam_local = "--runner=FnApiRunner"
    assert dataset_of(log, "several", [beam_local, "--direct_num_workers=3"]) == default
    monkeypatch.setattr("presage.pipelines.shuffle.ELEMENT_BYTES", 1_000)
    monkeypatch.setattr("presage.pipelines.beam.grouping.MAX_DESTINATIONS", 2)
    monkeypatch.setattr("presage.pipelines.beam.grouping.BUFFER_BYTES", 8_000)
    assert dataset_of(log, "levels", [beam_local]) == default


@pytest.mark.slow
@pytest.mark.parametrize(
    "runner",
    [
        [],
        pytest.param(PROCESSES, marks=pytest.mark.nightly),
        pytest.param(["--runner=FnApiRunner"], marks=pytest.mark.nightly),
    ],
)
def test_build_without_any_sample_says_so(runner: list[str], log: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job")
    job.write_text(job.read_text().replace("AS label FROM log", "AS label FROM log WHERE user < 0"))
    words = ["build", str(job), "--input", str(log / "log"), "--output", str(tmp_path / "none")]
    assert "the input yields no samples" in error_of(main, [*words, *runner])


def run_shuffle(
    chunks: list[pa.Table], num_parts: int, tmp_path: Path
) -> tuple[dict[int, list[Any]], dict[str, int]]:
    """Send chunks, a bundle each, to partitions; return these, and the counters of both levels."""
    job = load_job(write_job(tmp_path / "job"))
    data = replace(job.data, groups={"user": ("user", "history")})
    data = replace(data, session=replace(data.session, key="user"))
    context: Any = SimpleNamespace(data=data, num_parts=num_parts)
    groups, received = dict(data.groups), dict[int, list[Any]]()

    def receive(grouped: tuple[int, Any]) -> tuple[int, list[Any]]:
        samples = [expanded(t).to_pylist() for t in ReceivedSamples(list(grouped[1]))]
        return grouped[0], [tuple(map(str, row.values())) for rows in samples for row in rows]

    pipeline = beam.Pipeline(runner=FnApiRunner())
    collected = (
        pipeline
        | beam.Create(chunks)
        | beam.Reshuffle()
        | beam.Map(separate_tuples, groups).with_output_types(Tuples)
        | SendSamples(context)
        | beam.GroupByKey()
        | beam.Map(receive)
        | beam.combiners.ToList()
    )
    _ = collected | beam.Map(lambda values: (tmp_path / "received.txt").write_text(repr(values)))
    result = pipeline.run()
    result.wait_until_finish()
    received = dict(ast.literal_eval((tmp_path / "received.txt").read_text()))
    counters = result.metrics().query()["counters"]
    found = {f"{c.key.metric.namespace} {c.key.metric.name}": c.committed for c in counters}
    return received, {name: n for name, n in found.items() if name.startswith("Send")}


@pytest.mark.slow
@pytest.mark.parametrize("num_parts", [4, 23])
def test_samples_cross_in_as_many_elements_as_the_scale_model_allows(
    num_parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("presage.pipelines.beam.grouping.MAX_DESTINATIONS", 4)
    monkeypatch.setattr("presage.pipelines.beam.grouping.BUFFER_BYTES", 20_000)
    chunks = [chunk(seed, num_rows=200) for seed in range(30)]
    received, counts = run_shuffle(chunks, num_parts, tmp_path)
    rows = [row for part in chunks for row in part.to_pylist()]
    assert Counter(r for part in received.values() for r in part) == Counter(
        tuple(map(str, row.values())) for row in rows
    )
    users = np.arange(9)
    of_user = partition_of_key(hash_session_keys(pa.array(users)), num_parts)
    for part, samples in received.items():
        assert {int(of_user[int(user)]) for user, _, _ in samples} == {part}
    flushes, elements = counts["SendBundle flushes"], counts["SendBundle elements"]
    in_memory = sum(separate_tuples(c, {"user": ("user", "history")}).num_bytes for c in chunks)
    bundles = 3  # at most: the runner has one worker
    assert in_memory / 20_000 / 2 < flushes <= in_memory / 20_000 + bundles
    assert elements <= 4 * flushes
    if num_parts > 4:
        buckets = 4 * 6  # of each group, as many as it has partitions
        assert counts["SendBucket flushes"] <= buckets + flushes
        assert counts["SendBucket elements"] <= 6 * counts["SendBucket flushes"]
        assert elements + counts["SendBucket elements"] <= 2 * flushes * 4 + 6 * buckets
    else:
        assert "SendBucket flushes" not in counts


@given(st.integers(1, 50_000))
def test_destinations_of_a_flush_are_at_most_a_thousand(num_parts: int) -> None:
    destinations = Destinations("user", num_parts, -(-num_parts // 1000))
    assert destinations.num_groups <= 1000
    assert destinations.num_groups * destinations.per_group >= num_parts
    assert destinations.per_group == 1 or num_parts > 1000
