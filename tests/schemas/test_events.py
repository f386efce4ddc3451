"""Lines of a run are read back equal; only the last one may be incomplete."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from presage.schemas.errors import SchemaError
from presage.schemas.run.records import (
    PHASES,
    Decision,
    LedgerEntry,
    RunSummary,
    StepMetric,
    read_metrics,
    read_summary,
    to_line,
)

METRIC = StepMetric(
    step=0,
    loss=0.6931471805599453,
    num_samples=4096,
    num_replicas=2,
    samples_per_sec=1e5 / 3,
    phases=dict.fromkeys(PHASES, 0.001),
)
METRICS = [replace(METRIC, step=step, loss=1.0 / (step + 1)) for step in range(3)]
SUMMARY = RunSummary(
    num_steps=3,
    num_samples=12288,
    loss_first=1.0,
    loss_last=0.5,
    ne=None,
    auc=0.75,
    gauc=0.7,
    samples_per_sec=1e5,
    cache_hit_rate=None,
    fetched_rows=10,
    peak_rss_bytes=1 << 30,
)


def write_lines(path: Path) -> bytes:
    data = "".join(f"{to_line(metric)}\n" for metric in METRICS).encode()
    path.write_bytes(data)
    return data


def test_read_metrics_gives_back_what_was_written(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl")
    assert read_metrics(tmp_path / "metrics.jsonl") == METRICS


@pytest.mark.slow
def test_read_metrics_of_a_torn_last_line_leaves_only_it_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    data = write_lines(path)
    ends = [place for place, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        whole = sum(end <= size for end in ends)  # a line counts without its newline, too
        assert read_metrics(path) == METRICS[:whole]


BROKEN = {"cut": b'{"step":1,"lo', "other keys": b'{"step":1}', "no object": b"[1]"}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_read_metrics_of_a_broken_line_within_raises(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = write_lines(path).splitlines()
    path.write_bytes(b"\n".join([lines[0], broken, lines[2]]) + b"\n")
    start = re.escape(f"line is not a step metric: {broken.decode()!r} (")
    end = re.escape(f") in {path}:2; restore the file")
    with pytest.raises(SchemaError, match=f"^{start}.*{end}$"):
        read_metrics(path)


def test_read_summary_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(to_line(SUMMARY))
    assert read_summary(path) == SUMMARY


def test_read_summary_of_an_unfinished_run_raises(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    message = (
        f"summary of a finished run cannot be read: [Errno 2] No such file or directory: "
        f"'{path}' in {path}; train again"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        read_summary(path)
    path.write_text(to_line(SUMMARY)[:-1])
    with pytest.raises(SchemaError, match=r"^summary of a finished run cannot be read: "):
        read_summary(path)


RECORDS = {
    "metric": METRIC,
    "summary": SUMMARY,
    "ledger": LedgerEntry(
        step=1, epoch=0, segment="00000-a", replica="r0", blocks=(1, 2), num_samples=2048
    ),
    "decision": Decision(
        time_sec=1.5, job="demo", action="scale", reason="faster", values={"replicas": 2.0}
    ),
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())
def test_to_line_is_one_line_of_plain_json_with_every_field(record) -> None:
    line = to_line(record)
    assert "\n" not in line
    assert line.isascii()
    assert json.loads(line) == json.loads(json.dumps(asdict(record)))
    assert list(json.loads(line)) == sorted(asdict(record))
