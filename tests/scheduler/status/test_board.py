"""A board shows all complete lines of a log, however the file grows."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from presage.scheduler.controller.log import ARCHIVE, LOG, Log, recover
from presage.scheduler.status.board import Board
from presage.scheduler.status.view import View, view_of
from presage.schemas.errors import SchemaError
from tests.scheduler.status.recordings import archive_after, record_jobs


def folded(path: Path) -> View:
    """Return the view of a log that is read at once."""
    reader = recover(path)
    return view_of(reader.state, reader.journal)


@pytest.mark.slow
@given(data=st.data())
@settings(
    max_examples=5,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_view_of_a_log_that_grows_by_any_bytes_is_that_of_the_whole_one(
    tmp_path: Path, data: st.DataObject
) -> None:
    whole = tmp_path / "whole"
    whole.unlink(missing_ok=True)
    record_jobs(3).write_log(whole, 60)
    content = whole.read_bytes()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=4)))
    growing = tmp_path / LOG
    growing.unlink(missing_ok=True)
    board = Board(growing)
    assert not board.view().jobs
    for cut in cuts:
        growing.write_bytes(content[:cut])
        lines = content[:cut].rpartition(b"\n")[0]
        (tmp_path / "lines").write_bytes(lines and lines + b"\n")
        assert board.view() == folded(tmp_path / "lines")
    growing.write_bytes(content)
    assert board.view() == record_jobs(3).view(60) == folded(whole)
    assert board.view() is board.view(), "nothing is computed twice"


def test_view_of_another_log_in_the_place_is_that_of_the_other(tmp_path: Path) -> None:
    log = tmp_path / LOG
    record_jobs(1).write_log(log, 60)
    board = Board(log)
    board.view()
    log.unlink()
    record_jobs(3).write_log(log, 20)
    assert board.view() == record_jobs(3).view(20)


def damaged(lines: list[bytes]) -> dict[str, tuple[list[bytes], int]]:
    """Return logs that are none, and the line that says so."""
    return {
        "a line that is no JSON": ([*lines[:2], b"{torn\n", *lines[2:]], 3),
        "an event of no kind": ([*lines[:2], b'{"event":"Slept"}\n'], 3),
        "a snapshot that lacks": (lines[1:], 1),
    }


@pytest.mark.parametrize(
    "name", ["a line that is no JSON", "an event of no kind", "a snapshot that lacks"]
)
def test_view_of_a_damaged_log_names_the_line(tmp_path: Path, name: str) -> None:
    log = tmp_path / LOG
    record_jobs(1).write_log(log, 10)
    content, place = damaged(log.read_bytes().splitlines(keepends=True))[name]
    log.write_bytes(b"".join(content))
    board = Board(log)
    for _ in range(2):  # it is not forgotten by asking again
        with pytest.raises(SchemaError, match=re.escape(f"in {log}:{place}")):
            board.view()


@pytest.mark.slow
def test_view_of_a_log_that_was_archived_is_that_of_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive_after(20, monkeypatch)
    log, board = tmp_path / LOG, Board(tmp_path / LOG)
    recording = record_jobs(3)
    with Log(log) as writer:
        for number, (_, event, _, _) in enumerate(recording.events[:60], start=1):
            writer.handle(event)
            writer.archive_if_long()
            if number % 3 == 0:
                assert board.view() == recording.view(number)
    assert len(list((tmp_path / ARCHIVE).iterdir())) > 1
    assert Board(log).view() == board.view() == recording.view(60)
