"""The storage benchmark counts every byte once on both sides."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.common.clickouts import CLICKOUTS, write_clickouts
from benchmarks.common.logs import build_job, job_path
from benchmarks.common.shapes import SHAPES
from benchmarks.storage import limit_of, main, measure_dataset, smallest_file
from presage.pipelines.cli import main as main_of_pipelines
from presage.pipelines.report.sizes import bytes_by_table, chunk_bytes, derived_bytes
from presage.schemas.dataset.opened import open_dataset
from tests.pipelines.logs import IN_PROCESS, built
from tests.shared import json_of, output_of

CLUSTERED = {"clustered", "by session key", "by time of session"}
"""Orders of the peers that a dataset is compared with."""
SMALL = ("one row", "one sample a session", "next items", "constant columns", "numbers")
SYNTHETIC = ("clickouts", "clickouts_hourly", "no_repeats", "ten_rows")


def nightly_but(names: Sequence[str], *usual: str) -> list[Any]:
    """Return parameters of which only the usual ones are in `make test`."""
    return [n if n in usual else pytest.param(n, marks=pytest.mark.nightly) for n in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but(SMALL, "one row", "numbers"))
def test_rewritten_rows_take_no_more_than_the_best_sorted_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = SHAPES[name](np.random.default_rng(0), 5000)
    (tmp_path / "log").mkdir()
    pq.write_table(table, tmp_path / "log" / "log.parquet")
    sizes: dict[str, int] = {}
    for layout in ("star", "flat"):
        output = ["--output", str(tmp_path / layout), "--layout", layout, "--json", IN_PROCESS]
        names = ["--session", "session", "--time", "time"]
        assert main_of_pipelines(["rewrite", str(tmp_path / "log"), *names, *output]) == 0
        sizes[layout] = json.loads(capsys.readouterr().out)["bytes_after"]
    _, best = smallest_file(table, "session", "time", tmp_path / "peer.parquet")
    assert sizes["star"] <= limit_of(best)
    footer = pq.ParquetFile(tmp_path / "flat" / "00000.parquet").metadata.serialized_size
    assert sizes["flat"] <= 1.02 * best + footer


@pytest.mark.slow
def test_measure_counts_derived_columns_separately_and_shuffles_in_each_round(
    tmp_path: Path,
) -> None:
    dataset = open_dataset(built(tmp_path, num_rows=600))
    sizes = measure_dataset(dataset, 2, tmp_path)
    assert sizes.ours + sizes.transforms == dataset.segments[0].manifest.dataset_bytes
    assert sizes.transforms == derived_bytes(dataset) > 0
    assert sum(bytes_by_table(dataset).values()) == sizes.ours + sizes.transforms
    assert set(sizes.peers) == {
        f"{order}, {encodings}"
        for order in CLUSTERED | {"shuffled", "time-ordered"}
        for encodings in ("default", "best", "duckdb")
    }
    assert sizes.peers["clustered, best"] < sizes.peers["shuffled, default"]
    assert sizes.shuffles["default"][0] == sizes.peers["shuffled, default"]
    assert sizes.shuffles["default"][0] != sizes.shuffles["default"][1]
    assert sizes.ratios()["clustered, best"] == pytest.approx(
        sizes.peers["clustered, best"] / sizes.ours, abs=1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but(SYNTHETIC, "clickouts", "ten_rows"))
def test_dataset_without_oracle_is_within_the_limit(name: str, tmp_path: Path) -> None:
    config = replace(CLICKOUTS[name], num_sessions=min(300, CLICKOUTS[name].num_sessions))
    write_clickouts(config, tmp_path / "log")
    build_job(job_path(name, tmp_path), tmp_path / "log", tmp_path / "dataset")
    sizes = measure_dataset(open_dataset(tmp_path / "dataset"), 1, tmp_path)
    assert sizes.folder - sizes.transforms <= limit_of(sizes.peers["clustered, best"])
    assert sizes.folder <= limit_of(sizes.made_peers["best"])
    assert folder_of(tmp_path / "dataset") == sizes.folder


@pytest.mark.slow
def test_automatic_groups_of_ten_rows_take_fewer_bytes(tmp_path: Path) -> None:
    words = ["--json", "--parts", "logs", "--datasets", "ten_rows", "--rounds", "1"]
    details = json_of(main, [*words, "--shared-data", str(tmp_path)])["details"]["ten_rows"]
    assert details["auto"]["groups"] == {} != details["groups"]
    assert details["auto"]["bytes_ratio"] < 1 < details["auto"]["values_ratio"]
    assert details["requests"] > 0


def folder_of(dataset: Path) -> int:
    """The bytes of all files except the oracle, counted independently of the benchmark."""
    files = [p.relative_to(dataset) for p in dataset.rglob("*") if p.is_file()]
    oracle = re.compile(r"(^|/)(access|edges|index-[0-9a-f]+)/")
    others = re.compile(r"(_manifests|_leases|builds)/|job\.yaml$|schema\.pbtxt$|view\.sql$")
    counted = [p for p in files if not oracle.search(str(p)) and not others.match(str(p))]
    return sum((dataset / p).stat().st_size for p in counted)


def test_chunk_bytes_of_all_columns_is_the_file_without_header_and_footer(tmp_path: Path) -> None:
    dataset = built(tmp_path, num_rows=300)
    path = next(dataset.glob("segments/*/groups/user/*.parquet"))
    metadata = pq.read_metadata(path)
    columns = set(metadata.schema.to_arrow_schema().names)
    footer = metadata.serialized_size + 8  # its length and the magic bytes
    assert chunk_bytes(metadata, columns) == path.stat().st_size - footer - 4
    assert chunk_bytes(metadata, {"history"}) < chunk_bytes(metadata, columns)


@pytest.mark.slow
def test_main_prints_one_object_with_the_ratio_of_each_round(shared_data: Path) -> None:
    arguments = ["--json", "--parts", "logs", "--datasets", "ebnerd", "--rounds", "2"]
    lines = output_of(main, [*arguments, "--shared-data", str(shared_data)]).splitlines()
    assert len(lines) == 1
    found = json.loads(lines[0])
    assert {"ours", "peer", "ratio", "spread", "unit", "rounds", "details"} == set(found)
    assert len(found["rounds"]) == 2
    assert found["peer"] / found["ours"] == pytest.approx(found["ratio"], abs=1e-3)
    assert found["details"]["ebnerd"]["num_samples"] == 10_848
