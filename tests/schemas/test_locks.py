"""Locks: one holder, who is named, and none who is dead."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from presage.schemas.errors import SchemaError
from presage.schemas.storage.locks import LOCK, directory_lock, is_locked, lock_file
from tests.conftest import REPOSITORY

_HOLD = """
import sys, time
from pathlib import Path
from presage.schemas.storage.locks import directory_lock
with directory_lock(Path(sys.argv[1]), "", ""):
    print("held", flush=True)
    time.sleep(600)
"""


def test_directory_has_one_holder_who_is_named_until_he_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    command = [sys.executable, "-c", _HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert is_locked(folder)
        named = rf"^in use: pid {holder.pid} on {socket.gethostname()} since 2\d{{3}}-.* UTC in "
        with pytest.raises(SchemaError, match=named) as error, directory_lock(folder, "in use", ""):
            pass
        assert "\n" not in str(error.value)
        holder.kill()
    with directory_lock(folder, "in use", ""):
        assert f"pid {os.getpid()} on" in (folder / LOCK).read_text()
    assert not is_locked(folder)
    assert list(folder.iterdir()) == []


def test_directory_that_a_lock_created_is_removed_unless_something_was_written(
    tmp_path: Path,
) -> None:
    for name in ("empty", "filled"):
        with directory_lock(tmp_path / name, "in use", "wait"):
            (tmp_path / "filled").mkdir(exist_ok=True)
            (tmp_path / "filled" / "file").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["filled", "file"]


def test_file_is_waited_for_with_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as first, path.open("rb") as second:
        assert lock_file(first)
        assert not lock_file(second, 0.05)
        assert not lock_file(second, shared=True)
        first.close()
        assert lock_file(second, 0.05, shared=True)
