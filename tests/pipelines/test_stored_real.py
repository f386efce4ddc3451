"""30Music, whose histories shift: the same samples, and a fraction of the bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipelines.build import build
from pipelines.clustering.reader import read_samples
from pipelines.table.content_hash import content_hash
from schemas.dataset import Dataset, open_dataset
from schemas.layout import DATA_DIRECTORIES, window_columns
from tests.pipelines.logs import request

PLAIN = "  storage: {windows: none, shared_tuples: none}\n  oracle:"
OF_SESSIONS = ("key: session_id", "key: session_id")
OF_USERS = ("key: session_id", "key: user_id")


def history_bytes(dataset: Dataset) -> int:
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
@pytest.mark.parametrize("keys", [OF_SESSIONS, OF_USERS], ids=["sessions", "users"])
def test_histories_that_shift_take_two_and_a_half_times_less_as_windows(
    shared_data: Path, repository: Path, tmp_path: Path, keys: tuple[str, str]
) -> None:
    log = shared_data / "30music_sample10"
    if not log.is_dir():
        pytest.skip("30Music is not in the shared data")
    source = repository / "schemas" / "thirtymusic"
    text = (source / "job.yaml").read_text().replace(*keys)
    found: dict[str, Dataset] = {}
    for name, job in {"auto": text, "none": text.replace("  oracle:", PLAIN)}.items():
        directory = tmp_path / name
        directory.mkdir()
        (directory / "job.yaml").write_text(job)
        shutil.copy(source / "schema.pbtxt", directory)
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
