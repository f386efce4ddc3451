"""Bytes that are no text cost the rows that hold them, wherever they stand in a CSV file."""

import io
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.sources.csv_bytes import END, ValidText, bytes_meant, valid_text
from pipelines.sources.csv_source import read_csv
from pipelines.sources.folder import folder_of
from schemas.job_sources import SourceConfig

CONFIG = SourceConfig(
    files="*", format="csv", header=False, columns={"id": "int64", "name": "string"}
)


@pytest.mark.parametrize("bad", [b"7,\xff\xfe,8", b"\xff", b"7,\xc3", b"7,a\xed\xa0\x80"])
@pytest.mark.parametrize("place", [0, 3, 9])
def test_line_that_is_no_text_is_rejected_and_all_others_arrive(
    bad: bytes, place: int, tmp_path: Path
) -> None:
    lines = [f"{i},n\u00e9{i}".encode() for i in range(10)]
    lines[place] = bad
    (tmp_path / "a.csv").write_bytes(b"\n".join(lines))
    chunks = list(read_csv(folder_of(tmp_path), "a.csv", CONFIG))
    rows = [row for table, _ in chunks if table is not None for row in table.to_pylist()]
    rejects = [reject for _, found in chunks for reject in found]
    kept = [i for i in range(10) if i != place]
    assert rows == [{"id": i, "name": f"n\u00e9{i}", "_position": i} for i in kept]
    assert [(r.file, r.position) for r in rejects] == [("a.csv", place)]
    assert "\\x" in rejects[0].value


@given(st.binary(max_size=40), st.integers(0, 5))
def test_bytes_come_back_however_they_are_read(data: bytes, seed: int) -> None:
    draw = random.Random(seed)
    file = ValidText(io.BytesIO(data), CONFIG)
    found: list[bytes] = []
    while size := draw.randint(1, 9):
        found.append(file.read(size))
        assert len(found[-1]) <= size
        if not found[-1]:
            break
    text = b"".join(found)
    text.decode()
    assert bytes_meant(text) == data + b"\n" + END + b"," + END + b"\n"


def test_text_is_left_as_it_is() -> None:
    data = "a,\u00e9\U0010ffff\n".encode()
    assert valid_text(data, True) == (data, b"")
    assert bytes_meant(data) == data
