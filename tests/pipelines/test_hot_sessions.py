"""Sessions of any size: built in bounded memory, with nothing lost and the same order."""

import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.build import build
from pipelines.clustering import part as pieces
from pipelines.clustering.reader import expand
from pipelines.demo_log.log import GeneratorConfig, write_log
from pipelines.table.verify import verify
from schemas.dataset import open_dataset
from schemas.layout import STATISTICS
from tests.pipelines.logs import request, samples_of, write_job
from tests.pipelines.logs import write_log as write_small_log
from tests.pipelines.test_build import read_back

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "schemas" / "demo" / "job.yaml"
WORKER_BYTES = 2 << 30
MEASURED = """
import resource, sys
import apache_beam
from pipelines.cli import main
from pipelines.clustering import part as pieces

pieces.CHUNK_BYTES = int(sys.argv[1])
status = main(sys.argv[2:])
print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("piece_bytes", [1, 10_000])
def test_a_part_in_pieces_holds_the_same_samples_in_the_same_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    rows = write_small_log(tmp_path / "log", 600)
    job = write_job(tmp_path / "job")
    build(request(job, tmp_path / "log", tmp_path / "whole"))
    monkeypatch.setattr(pieces, "CHUNK_BYTES", piece_bytes)
    build(request(job, tmp_path / "log", tmp_path / "pieces"))
    assert not verify(tmp_path / "pieces")["problems"]
    assert read_back(tmp_path / "pieces", tmp_path / "pieces.parquet") == samples_of(rows)
    expand(tmp_path / "whole", tmp_path / "whole.parquet")
    assert pq.read_table(tmp_path / "pieces.parquet") == pq.read_table(tmp_path / "whole.parquet")
    whole, cut = (open_dataset(tmp_path / d).segments[0] for d in ("whole", "pieces"))
    assert whole.blocks.drop_columns(["row_group"]) == cut.blocks.drop_columns(["row_group"])
    assert cut.blocks["row_group"].to_pylist() != whole.blocks["row_group"].to_pylist()
    assert whole.manifest.groups == cut.manifest.groups
    assert whole.manifest.tables == cut.manifest.tables
    assert whole.manifest.num_sessions == cut.manifest.num_sessions
    statistics = [(s.directory / STATISTICS).read_bytes() for s in (whole, cut)]
    assert statistics[0] == statistics[1]


def hot_log(directory: Path, num_samples: int, num_hot: int) -> Path:
    """Write a log like the demo's, in which half of the samples belong to a few sessions."""
    start, span = datetime(2026, 1, 1), timedelta(days=2)
    config = GeneratorConfig(num_samples=num_samples, seed=1, start=start, span=span)
    for number, path in enumerate(write_log(config, directory)):
        table = pq.read_table(path)
        session = table["session_id"].to_numpy().copy()
        hot = np.random.default_rng(number).random(len(session)) < 0.5
        session[hot] = np.random.default_rng(number).integers(0, num_hot, hot.sum())
        place = table.column_names.index("session_id")
        pq.write_table(table.set_column(place, "session_id", pa.array(session)), path)
    return directory


def peak_bytes(tmp_path: Path, log: Path, piece_bytes: int) -> int:
    """Build a dataset in one worker; return the most memory that it has taken."""
    places = ["--input", str(log), "--output", str(tmp_path / f"dataset-{piece_bytes}")]
    build = ["build", str(DEMO), *places, "--direct_num_workers=1"]
    measured = subprocess.run(
        [sys.executable, "-c", MEASURED, str(piece_bytes), *build],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(measured.stdout.splitlines()[-1])


@pytest.mark.chaos
def test_memory_follows_the_size_of_a_piece_and_not_that_of_a_session(tmp_path: Path) -> None:
    log = hot_log(tmp_path / "log", num_samples=40_000, num_hot=1)
    whole, cut = (peak_bytes(tmp_path, log, 1 << power) for power in (40, 22))
    assert whole - cut > 40 << 20


@pytest.mark.chaos
@pytest.mark.parametrize(("num_samples", "num_hot"), [(2_000_000, 1), (1_000_000, 10)])
def test_hot_sessions_build_in_bounded_memory(
    tmp_path: Path, num_samples: int, num_hot: int
) -> None:
    log = hot_log(tmp_path / "log", num_samples, num_hot)
    assert peak_bytes(tmp_path, log, pieces.CHUNK_BYTES) < WORKER_BYTES
    (dataset,) = tmp_path.glob("dataset-*")
    assert open_dataset(dataset).segments[0].manifest.num_samples == num_samples
