"""Names that leave their folder, URLs and network filesystems are refused."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from presage.schemas.entry import process_variables
from presage.schemas.errors import SchemaError
from presage.schemas.paths import (
    ArgumentParser,
    find_mount,
    is_below,
    local_path,
    network_warning,
    schema_path,
)
from tests.conftest import REPOSITORY

MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
40 27 0:40 / /mnt/nfs rw shared:1 - nfs4 server:/export rw,vers=4.2
41 40 0:41 / /mnt/nfs/scratch rw - tmpfs tmpfs rw
42 27 0:42 / /mnt/with\\040space rw master:2 propagate_from:3 - fuse.sshfs host: rw
43 27 0:43 / /mnt/win rw - cifs //host/share rw
44 27 0:44 / /mnt/host rw - 9p drvfs rw
45 27 0:45 / /mnt/cloud rw - fuse.gcsfuse bucket rw
46 27 0:46 / /mnt/rootless rw - fuse.fuse-overlayfs overlay rw
47 27 0:47 / /mnt/ntfs rw - fuseblk /dev/sdb1 rw
48 27 0:48 / /mnt/docker rw - overlay overlay rw,lowerdir=/a
49 27 0:49 / /mnt/ceph rw - ceph 10.0.0.1:/ rw
50 27 0:50 / /mnt/twice rw - ext4 /dev/vdb rw
51 50 0:51 / /mnt/twice rw - nfs server:/export rw
52 27 0:52 / /mnt/lustre rw - lustre 10.0.0.1@tcp:/fs rw,localflock
"""
SHARED = {
    "/mnt/nfs/a/dataset": "nfs4 (mounted at /mnt/nfs)",
    "/mnt/nfs": "nfs4",
    "/mnt/with space/run": "fuse.sshfs (mounted at /mnt/with space)",
    "/mnt/win/x": "cifs",
    "/mnt/host/x": "9p",
    "/mnt/cloud/x": "fuse.gcsfuse",
    "/mnt/ceph/x": "ceph",
    "/mnt/lustre/x": "lustre",
    "/mnt/twice/x": "nfs (mounted at /mnt/twice)",
}
LOCAL = (
    "/mnt/nfs/scratch/x",
    "/mnt/nfsx/x",
    "/mnt/rootless/x",
    "/mnt/ntfs/x",
    "/mnt/docker/x",
    "/srv/x",
)


@pytest.mark.parametrize("place", SHARED)
def test_network_filesystem_gets_a_warning_of_one_line(place: str) -> None:
    warning = network_warning(Path(place), MOUNTS)
    assert SHARED[place] in warning
    assert repr(place) in warning
    assert "\n" not in warning


@pytest.mark.parametrize("place", LOCAL)
def test_local_filesystem_gets_no_warning(place: str) -> None:
    assert network_warning(Path(place), MOUNTS) == ""


def test_link_to_a_network_filesystem_gets_a_warning(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/mnt/nfs/data")
    assert "nfs4" in network_warning(tmp_path / "link" / "dataset", MOUNTS)


def test_this_machine_names_the_filesystem_of_a_temporary_folder(tmp_path: Path) -> None:
    point, kind = find_mount(
        Path(os.path.realpath(tmp_path)), Path("/proc/self/mountinfo").read_text()
    )
    stat = subprocess.run(
        ["stat", "--file-system", "--format=%T", tmp_path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert tmp_path.is_relative_to(point)
    assert stat.stdout.strip().startswith(kind[:3]), "`stat` asks the kernel by statfs"
    assert network_warning(tmp_path) == ""


MOUNTING = """
import ctypes, os, sys
kind, place = sys.argv[1:]
data = b""
if kind.startswith("fuse"):
    data = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % os.open("/dev/fuse", os.O_RDWR)
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"none", place.encode(), kind.encode(), 0, data):
    sys.exit(os.strerror(ctypes.get_errno()))
print(open("/proc/self/mountinfo").read())
"""


@pytest.mark.parametrize(("kind", "is_shared"), [("tmpfs", False), ("fuse.test", True)])
def test_filesystem_that_is_really_mounted_is_known(
    kind: str, is_shared: bool, tmp_path: Path
) -> None:
    place = tmp_path / "with space"
    place.mkdir()
    command = ["unshare", "--mount", sys.executable, "-c", MOUNTING, kind, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no mount may be made here: {done.stderr.strip()}")
    assert find_mount(place / "x", done.stdout) == (str(place), kind)
    assert (kind in network_warning(place / "x", done.stdout)) == is_shared


URLS = ("s3://bucket/x", "gs://b", "hdfs://n/x", "az://c/x", "http://h/x", "s3:/b", "file://host/x")


@pytest.mark.parametrize("url", URLS)
def test_url_is_no_place_of_this_machine(url: str) -> None:
    with pytest.raises(SchemaError, match="must be local, got"):
        local_path(url)


def test_file_url_and_paths_with_colons_are_places() -> None:
    assert local_path("file:///a/b c") == Path("/a/b c")
    assert local_path("file:/a") == Path("/a")
    assert local_path("2026-01-01T10:00/x") == Path("2026-01-01T10:00/x")
    assert local_path("a:/b") == Path("a:/b")


def test_arguments_of_every_command_are_read_as_local_places(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = ArgumentParser(prog="test")
    command = parser.add_subparsers(dest="command").add_parser("build")
    command.add_argument("--output", type=Path)
    found = parser.parse_args(["build", "--output", "file:///tmp/x"])
    assert found == argparse.Namespace(command="build", output=Path("/tmp/x"))
    with pytest.raises(SystemExit):
        parser.parse_args(["build", "--output", "s3://bucket/x"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("test build: error: argument --output: path must be local")


@pytest.mark.parametrize("path", ["", ".", "..", "a/../../b", "/a", "a/..", "../a", "a\0b"])
def test_path_that_leads_elsewhere_is_not_below(path: str) -> None:
    assert not is_below(path)


def test_schema_outside_the_folder_of_the_job_needs_a_flag(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    assert schema_path(job, "a/../schema.pbtxt") == tmp_path / "a/../schema.pbtxt"
    for schema in ("../x.pbtxt", "/etc/x.pbtxt", "a/../../x.pbtxt"):
        with pytest.raises(SchemaError, match=r"data\.schema must be in the folder") as error:
            schema_path(job, schema)
        assert f"in {job}; copy it there, or give --allow-outside" in str(error.value)
        assert schema_path(job, schema, allow_outside=True) == tmp_path / schema


def test_user_without_an_entry_and_a_home_gets_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_001)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    variables = process_variables()
    assert (variables["HOME"], variables["USER"]) == (str(tmp_path), "uid-4000000001")
    monkeypatch.setenv("HOME", "/given")
    assert process_variables()["HOME"] == "/given"
    monkeypatch.undo()
    assert "HOME" not in process_variables()


@pytest.mark.parametrize("package", ["pipelines", "trainer", "scheduler", "presage"])
def test_command_in_a_locale_without_unicode_says_what_to_set(package: str, tmp_path: Path) -> None:
    words = {"trainer": "verify", "scheduler": "status"}.get(package, "vacuum")
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    ended = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-m", package, words, os.fsencode(tmp_path / "\u00e9")],
        env={**os.environ, **locale, "PYTHONIOENCODING": "ascii"},
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
    )
    message = b"error: file names must be UTF-8, got the encoding ascii; set PYTHONUTF8=1\n"
    assert (ended.returncode, ended.stderr) == (1, message)
