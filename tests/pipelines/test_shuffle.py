"""Samples through the shuffle, by reference and by value: nothing lost, the same bytes stored."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from apache_beam.coders.typecoders import registry
from hypothesis import given
from hypothesis import strategies as st

from pipelines.cli import main
from pipelines.samples.tuples import Tuples, separate_tuples
from pipelines.shuffle import (
    PACKET_BYTES,
    ByReference,
    ByValue,
    ShuffleTransport,
    check_same_order,
    decode_table,
    decode_tables,
    encode_by_target,
    encode_tables,
    join_packets,
    split_packets,
)
from tests.pipelines.logs import bytes_of, write_job, write_log

LIMIT = 27


@given(st.lists(st.binary(max_size=20), max_size=8), st.randoms(use_true_random=False))
def test_messages_of_shuffled_packets_are_those_that_were_cut(
    sent: list[bytes], order: Random
) -> None:
    cut = [packet for message in sent for packet in split_packets(message, LIMIT)]
    order.shuffle(cut)
    assert Counter(join_packets(cut)) == Counter(sent)
    assert all(len(packet) <= LIMIT for packet in cut)


def test_messages_without_one_packet_are_refused() -> None:
    cut = list(split_packets(b"abcdefgh", LIMIT))
    message = "packets are missing: 1 incomplete messages"
    with pytest.raises(ValueError, match=re.escape(message)):
        list(join_packets(cut[1:]))


def test_messages_that_come_in_another_order_again_are_refused() -> None:
    seen: list[bytes] = []
    assert list(check_same_order([b"a", b"b"], seen)) == list(check_same_order([b"a", b"b"], seen))
    message = "the runner changed the order of samples between reads; try again"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        list(check_same_order([b"b", b"a"], seen))


def test_a_large_table_crosses_in_packets_of_eight_mebibytes() -> None:
    values = np.random.default_rng(0).integers(0, 1 << 62, (PACKET_BYTES // 8) * 2 + 5)
    table = pa.table({"ids": pa.array([values], pa.large_list(pa.int64()))})  # one row of 16 MiB
    cut = list(split_packets(encode_tables(table)))
    assert [len(p) == PACKET_BYTES for p in cut] == [True, True, False]
    (found,) = decode_tables(next(join_packets(cut)))
    assert found.equals(table)


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


@pytest.mark.parametrize("kind", ["references", "values"])
def test_samples_of_each_partition_arrive_whole(kind: str, tmp_path: Path) -> None:
    groups = {"user": ("user", "history")}
    by: ShuffleTransport = (
        ByReference(tmp_path, ("user",)) if kind == "references" else ByValue(("user",))
    )
    coder = registry.get_coder(by.element)
    chunks = [separate_tuples(chunk(seed), groups) for seed in range(3)]
    arrived: dict[int, list[Any]] = {}
    for samples in chunks:
        for part, element in by.send([None, samples, samples]):
            arrived.setdefault(part, []).append(coder.decode(coder.encode(element)))
    assert sorted(arrived) == [1, 2]
    for elements in arrived.values():
        received = by.receive(elements[::-1])
        found = [expanded(t) for t in received]
        assert [expanded(t) for t in received] == found  # gone through again
        wanted = [expanded(t) for t in chunks]
        assert sorted(t.to_pylist().__repr__() for t in found) == sorted(
            t.to_pylist().__repr__() for t in wanted
        )


def test_raw_rows_of_each_target_cross_in_elements_that_are_not_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipelines.shuffle.PACKET_BYTES", 2_000)
    values = np.random.default_rng(0).integers(0, 1 << 62, 900)
    found: dict[int, list[int]] = {}
    for part, content in encode_by_target(pa.table({"x": pa.array(values)}), np.arange(900) % 2):
        assert len(content) <= 2_000
        found.setdefault(part, []).extend(decode_table(content)["x"].to_pylist())
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
def test_builds_by_reference_and_by_value_with_any_workers_give_the_same_bytes(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.prepare.PART_INPUT_BYTES", 4_000)
    default = dataset_of(log, "default", [])
    assert dataset_of(log, "one", ["--direct_num_workers=1"]) == default
    shared = sorted(p.name for p in (log / "default").rglob("*") if p.is_file())
    monkeypatch.setattr("pipelines.shuffle.split_packets", partial(split_packets, limit=1_000))
    monkeypatch.setattr("pipelines.shuffle.write_chunk", None)  # by value, no file is written
    assert dataset_of(log, "values", ["--shuffle_by=values"]) == default
    assert sorted(p.name for p in (log / "values").rglob("*") if p.is_file()) == shared


@pytest.mark.slow
def test_build_without_any_sample_says_so_either_way(log: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job")
    job.write_text(job.read_text().replace("AS label FROM log", "AS label FROM log WHERE user < 0"))
    for kind in ("references", "values"):
        words = ["build", str(job), "--input", str(log / "log"), "--output", str(tmp_path / kind)]
        assert main([*words, f"--shuffle_by={kind}"]) == 1


def test_unknown_way_through_the_shuffle_is_refused(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["build", str(log / "job" / "job.yaml"), "--input", str(log / "log")]
    assert main([*words, "--output", str(log / "bad"), "--shuffle_by=pigeons"]) == 1
    assert (
        "shuffle_by must be one of ('references', 'values'), got 'pigeons'"
        in capsys.readouterr().err
    )
