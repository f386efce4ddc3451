"""New lines of the log of a run, in its folder or at its URL, while it is trained and restored."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path

import pytest

from presage.schemas.errors import SchemaError
from presage.schemas.run.records import METRICS, SUMMARY
from presage.schemas.run.run_manifest import (
    OBJECTS,
    RunLogTail,
    RunManifest,
    RunObject,
    commit_state,
    read_newest_state,
    read_run_file,
)
from presage.schemas.storage.location import Location


class Written:
    """A run in a folder or at a URL whose log is replaced as a whole."""

    def __init__(self, run: Location) -> None:
        self.run = run

    def write(self, *parts: bytes, name: str = METRICS) -> None:
        """Replace a file; at a URL each part is an object, which others are deleted for."""
        if self.run.local is not None:
            (self.run / name).write_bytes(b"".join(parts))
            return
        objects: list[RunObject] = []
        for part in parts:
            path = f"{OBJECTS}/{uuid.uuid4().hex}/{name}"
            (self.run / path).write_bytes(part)
            sha256 = hashlib.sha256(part).hexdigest()
            objects.append(RunObject(name=path, num_bytes=len(part), sha256=sha256))
        old = read_newest_state(self.run)
        manifest = RunManifest(writer=uuid.uuid4().hex, files={name: tuple(objects)})
        assert commit_state(self.run, old, manifest)
        self.run.remove([] if old is None else old.manifest.objects)


@pytest.fixture(params=["folder", "URL"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Written:
    is_local = request.param == "folder"
    return Written(Location.parse(tmp_path if is_local else f"memory://b/{uuid.uuid4().hex}"))


def test_each_line_is_read_once(written: Written) -> None:
    tail = RunLogTail(written.run, METRICS)
    assert tail.read() == ([], False)
    written.write(b"1\n", b"2\n")
    assert tail.read() == ([b"1\n", b"2\n"], False)
    assert tail.read() == ([], False)
    written.write(b"1\n2\n", b"3\n4")
    assert tail.read() == ([b"3\n"], False)
    written.write(b"1\n2\n3\n4\n5\n")
    assert tail.read() == ([b"4\n", b"5\n"], False)


def test_lines_of_a_restored_run_are_read_from_the_first_one(written: Written) -> None:
    tail = RunLogTail(written.run, METRICS)
    written.write(b"1a\n2a\n3a\n")
    tail.read()
    written.write(b"1a\n")  # shorter
    assert tail.read() == ([b"1a\n"], True)
    written.write(b"1a\n", b"2b\n")
    assert tail.read() == ([b"2b\n"], False)
    written.write(b"1a\n2c\n3c\n4c\n")  # longer, with other lines
    assert tail.read() == ([b"1a\n", b"2c\n", b"3c\n", b"4c\n"], True)
    written.write(b"")
    assert tail.read() == ([], True)


def test_unchanged_state_at_a_url_costs_one_list_request(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(Location.parse(f"memory://b/{uuid.uuid4().hex}"))
    written.write(b"1\n2\n")
    tail = RunLogTail(written.run, METRICS)
    tail.read()
    monkeypatch.setattr(Location, "read_bytes", lambda _: pytest.fail("nothing is read"))
    assert tail.read() == ([], False)


def test_only_new_bytes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(Location.parse(f"memory://b/{uuid.uuid4().hex}"))
    tail, lines = RunLogTail(written.run, METRICS), [b"%04d\n" % number for number in range(100)]
    written.write(b"".join(lines[:90]), b"".join(lines[90:]))
    tail.read()
    ranges: list[tuple[int, int]] = []
    read_ranges = Location.read_ranges

    def record(self: Location, wanted: list[tuple[int, int]]) -> list[memoryview]:
        ranges.extend(wanted)
        return read_ranges(self, wanted)

    monkeypatch.setattr(Location, "read_ranges", record)
    written.write(b"".join(lines[:90]), b"".join(lines[90:]), b"new\n")
    assert tail.read() == ([b"new\n"], False)
    assert ranges == [(45, 50), (0, 4)]


def test_summary_is_read_wherever_the_run_is(written: Written) -> None:
    assert read_run_file(written.run, SUMMARY) is None
    written.write(b"first, ", b"second", name=SUMMARY)
    assert read_run_file(written.run, SUMMARY) == b"first, second"


def test_missing_object_of_the_newest_state_is_named() -> None:
    written = Written(Location.parse(f"memory://b/{uuid.uuid4().hex}"))
    written.write(b"summary", name=SUMMARY)
    written.run.remove(e.path for e in written.run.entries() if e.path.startswith(OBJECTS))
    with pytest.raises(SchemaError, match=r"^object of the run is missing: "):
        read_run_file(written.run, SUMMARY)
