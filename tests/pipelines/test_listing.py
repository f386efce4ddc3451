# ruff: noqa: E501 - a table of globs, one a line
"""Files of a source: globs, links, object stores, files that appear and disappear."""

import errno
import io
import os
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from presage.pipelines.build import build
from presage.pipelines.cli import main
from presage.pipelines.sources.listing import list_inputs
from presage.pipelines.sources.raw_rows import Folder, folder_of
from presage.schemas.config.sources import SourceConfig
from presage.schemas.dataset.manifest import read_dataset
from presage.schemas.errors import SchemaError
from presage.schemas.raw_files import glob_regex
from presage.schemas.storage.location import Location
from tests.pipelines.logs import bytes_of, raw_rows, request, write_job, write_log

GLOBS: dict[str, tuple[str, list[str], list[str]]] = {
    "one folder": ("*.json", ["a.json", ".json"], ["d/a.json", "a.jsonl"]),
    "a folder between": ("d/*/a.json", ["d/x/a.json"], ["d/a.json", "d/x/y/a.json"]),
    "any folders": ("d/**/a.json", ["d/a.json", "d/x/a.json", "d/x/y/a.json"], ["a.json", "d/xa.json"]),
    "everything below": ("d/**", ["d/a", "d/x/a"], ["d", "e/a"]),
    "one character": ("a?.json", ["ab.json"], ["a.json", "a/.json"]),
    "a range": ("[a-c]*.json", ["a1.json", "c.json"], ["d.json", "/a.json"]),
    "no range": ("[!a-c].json", ["d.json"], ["a.json", "/.json"]),
    "a bracket that is not closed": ("a[b.json", ["a[b.json"], ["ab.json"]),
    "a dot": ("a.json", ["a.json"], ["axjson"]),
}  # fmt: skip


@pytest.mark.parametrize(("pattern", "inside", "outside"), GLOBS.values(), ids=GLOBS)
def test_star_stays_in_its_folder(pattern: str, inside: list[str], outside: list[str]) -> None:
    regex = glob_regex(pattern)
    assert [p for p in inside if not regex.fullmatch(p)] == []
    assert [p for p in outside if regex.fullmatch(p)] == []


def names(folder: Folder, pattern: str) -> list[str]:
    config = SourceConfig(files=pattern, format="parquet")
    return [f.path for f in list_inputs(folder, {"log": config})]


def test_file_that_links_reach_again_counts_once(tmp_path: Path) -> None:
    (tmp_path / "log" / "2026-01-01").mkdir(parents=True)
    (tmp_path / "log" / "2026-01-01" / "a").write_text("a")
    (tmp_path / "log" / "latest").symlink_to("2026-01-01")
    (tmp_path / "log" / "0").symlink_to("2026-01-01/a")
    (tmp_path / "log" / "2026-01-01" / "up").symlink_to("..")
    folder = folder_of(tmp_path / "log")
    assert names(folder, "**") == ["2026-01-01/a"]
    assert names(folder, "latest/*") == ["latest/a"]
    assert names(folder, "*") == ["0"]


def test_folder_that_is_a_link_itself_is_read(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "a").write_text("a")
    (tmp_path / "link").symlink_to("log")
    assert names(folder_of(tmp_path / "link"), "*") == ["a"]


def test_file_that_goes_while_it_is_listed_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("a")
    monkeypatch.setattr(Folder, "all_files", lambda _: {"a": None, "b": None})
    message = "file was removed while it was listed in b; wait until the log is complete"
    with pytest.raises(SchemaError, match="^" + re.escape(message) + "$"):
        names(folder_of(tmp_path), "*")


def test_what_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log" / "day").mkdir(parents=True)
    (tmp_path / "log" / "a").write_text("a")
    (tmp_path / "log" / "mount").symlink_to(tmp_path / "gone")
    with pytest.raises(SchemaError, match=r"^link leads to nothing in .*/mount; remove it, or"):
        names(folder_of(tmp_path / "log"), "*")
    (tmp_path / "log" / "mount").unlink()
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("day"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SchemaError, match=r"^folder cannot be listed: Permission denied in .*/day"):
        names(folder_of(tmp_path / "log"), "*")


LEFT_BY_ENGINES = {
    "_temporary/0/b": "belong to unfinished jobs in _temporary/0/b",
    "x/_delta_log/00000.json": r"table format \(_delta_log\).* in .*/x;",
    "x/.hoodie/hoodie.properties": r"table format \(\.hoodie\)",
    "x/metadata/v1.metadata.json": r"table format \(Iceberg metadata\)",
}


@pytest.mark.parametrize("path", LEFT_BY_ENGINES)
def test_files_that_an_engine_has_not_committed_are_refused(path: str, tmp_path: Path) -> None:
    for name in ("x/a", "day=_1/a", path):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a")
    with pytest.raises(SchemaError, match=LEFT_BY_ENGINES[path]):
        names(folder_of(tmp_path), "**")
    assert names(folder_of(tmp_path), "day*/*") == ["day=_1/a"]
    assert names(folder_of(tmp_path, ("x/a",)), "**") == ["x/a"]
    if path.startswith("_"):
        assert names(folder_of(tmp_path), "_temporary/**") == [path]


@pytest.mark.slow
def test_log_in_an_object_store_gives_the_bytes_of_a_local_one(tmp_path: Path) -> None:
    write_log(tmp_path / "log" / "day")
    (tmp_path / "log" / ".tmp").write_bytes(b"unfinished")
    stored = Location.parse(f"memory://{tmp_path.name}/x")
    for path in (tmp_path / "log").rglob("*"):
        if path.is_file():
            (stored / str(path.relative_to(tmp_path / "log"))).write_bytes(path.read_bytes())
    job = write_job(tmp_path / "job")
    job.write_text(job.read_text().replace('"*.parquet"', '"day/*.parquet"'))
    build(request(job, tmp_path / "log", tmp_path / "local"))
    build(request(job, stored.url, tmp_path / "remote"))
    assert bytes_of(tmp_path / "remote") == bytes_of(tmp_path / "local")


@pytest.mark.slow
def test_object_that_is_damaged_or_gone_is_rejected_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = io.BytesIO()
    pq.write_table(raw_rows(60, seed=3), sink)
    stored = Location.parse(f"memory://{tmp_path.name}")
    (stored / "a.parquet").write_bytes(sink.getvalue())
    (stored / "b.parquet").write_bytes(sink.getvalue()[:-100])
    (stored / "c.parquet").write_bytes(sink.getvalue())
    listed = list_inputs(folder_of(stored.url), {"log": SourceConfig(files="*", format="parquet")})
    assert (listed[0].path, listed[0].num_bytes) == ("a.parquet", len(sink.getvalue()))
    stored.remove(["c.parquet"])
    monkeypatch.setattr("presage.pipelines.prepare.list_inputs", lambda *_: listed)
    job = write_job(tmp_path / "job", on_error="reject_files")
    result = build(request(job, stored.url, tmp_path / "dataset"))
    rejects = pq.read_table(next((tmp_path / "dataset").rglob("rejects/*.parquet"))).to_pylist()
    assert [(r["file"], r["position"]) for r in rejects] == [
        ("b.parquet", None),
        ("c.parquet", None),
    ]
    assert rejects[0]["reason"].startswith("file is not Parquet: ")
    assert rejects[1]["reason"] == "file was removed after it was listed"
    assert result["num_samples"] > 60


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (
            "memory://bucket/y",
            "there is no input: no directory in memory://bucket/y; check the path",
        ),
        (
            "hdfs://host/log",
            "scheme is unknown: 'hdfs' in hdfs://host/log; use a path or file://, s3://, ",
        ),
    ],
)
def test_url_that_leads_nowhere_is_refused(root: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="^" + re.escape(message)):
        build(request(write_job(tmp_path / "job"), root, tmp_path / "dataset"))


# Some files of an input (`--only`).

FILES = ("a.parquet", "day/b.parquet", "day/c.parquet", "day/side.parquet", "notes.txt", ".tmp")
SOURCES = {
    "log": SourceConfig(files="**/[abc].parquet", format="parquet"),
    "side": SourceConfig(files="day/side.parquet", format="parquet"),
}


@pytest.fixture(params=["folder", "memory", "s3"])
def make_input(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Iterable[str]], str]:
    """Write files into a new folder or URL and return it."""
    root = f"memory://{tmp_path.name}/" if request.param == "memory" else f"{tmp_path}/"
    if request.param == "s3":
        s3_store = request.getfixturevalue("s3_store")
        for name, value in s3_store.environment.items():
            monkeypatch.setenv(name, value)
        root = f"{s3_store.new_url()}/"

    def write(name: str, paths: Iterable[str]) -> str:
        for path in paths:
            if request.param in ("memory", "s3"):
                Location.parse(f"{root}{name}/{path}").write_bytes(path.encode())
            else:
                (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name / path).write_text(path)
        return root + name

    return write


@pytest.mark.parametrize("seed", range(4))
def test_files_named_by_only_are_listed_as_if_there_were_no_others(
    seed: int, make_input: Callable[[str, Iterable[str]], str]
) -> None:
    draws = random.Random(seed)
    others = draws.sample(FILES[1:], draws.randrange(len(FILES)))
    only = ("a.parquet", "day/side.parquet", *others, "./a.parquet", *others)
    whole = folder_of(make_input("whole", FILES), only)
    part = folder_of(make_input("part", {"a.parquet", "day/side.parquet", *others}))
    assert list(whole.files()) == list(part.files())
    assert list_inputs(whole, SOURCES) == list_inputs(part, SOURCES)
    assert folder_of(whole.root, ("./day//b.parquet",)).files().keys() == {"day/b.parquet"}


@pytest.mark.parametrize("name", ["b.parquet", "day", "../whole/a.parquet", "/etc/hostname", ""])
def test_only_names_files_of_the_input(
    name: str, make_input: Callable[[str, Iterable[str]], str]
) -> None:
    root = make_input("whole", FILES)
    message = f"input has no file {name!r} in {root}; write the path of one with --only"
    with pytest.raises(SchemaError, match=re.escape(message)):
        list_inputs(folder_of(root, ("a.parquet", name)), SOURCES)


def test_source_without_a_file_of_only_is_named(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    with pytest.raises(SchemaError, match=r"no file of source 'side' matches 'day/side\.parquet'"):
        list_inputs(folder_of(tmp_path / "log", ("log-0.parquet",)), {"side": SOURCES["side"]})


@pytest.mark.slow
def test_segments_of_some_files_are_those_of_folders_with_these_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path / "log", num_files=4)
    segments = [["log-2.parquet", "log-0.parquet"], ["log-1.parquet"]]
    inputs = dict[str, list[str]]()
    job = str(write_job(tmp_path / "job"))
    for number, names in enumerate(segments):
        folder = tmp_path / f"part-{number}"
        folder.mkdir()
        for name in names:
            (folder / name).hardlink_to(tmp_path / "log" / name)
        only = [word for name in names for word in ("--only", name)]
        inputs = {"whole": ["--input", f"{tmp_path}/log", *only], "parts": ["--input", f"{folder}"]}
        for dataset, words in inputs.items():
            target = ["append", job, "--dataset"] if number else ["build", job, "--output"]
            assert main([*target, f"{tmp_path}/{dataset}", *words]) == 0
    for words in inputs.values():
        assert main(["preview", job, *words, "--json"]) == 0
    assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path / "parts")
    capsys.readouterr()
    words = ["--input", f"{tmp_path}/log", "--only", "log-1.parquet"]
    assert main(["append", job, "--dataset", f"{tmp_path}/whole", *words, "--json"]) == 0
    assert len(read_dataset(tmp_path / "whole").segments) == 2, "the segment is there already"
