"""The laws of `Location` at a local path, in memory, and at three real stores, and with faults."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from presage.schemas.errors import SchemaError
from presage.schemas.storage import store_client
from presage.schemas.storage.location import Location, StorageError, local_copy, new_folder
from presage.schemas.storage.probes import check_conditional_put, store_time
from tests.fault_proxy import FAULTS, Faults
from tests.object_store import BUCKET, SECRET_KEY, Store, gcs_server

STORES = {"s3": "s3_store", "gs": "gcs_store", "az": "azure_store"}
ALL_STORES = [pytest.param(name, marks=[pytest.mark.slow] * (name != "s3")) for name in STORES]
PLACES = ["file", "memory", *ALL_STORES]
pytestmark = pytest.mark.timeout(1800)  # the first test may build a server
NUM_WRITERS = 16
NUM_PROCESSES = 6


def connect(store: Store, monkeypatch: pytest.MonkeyPatch) -> Location:
    """Let clients of this process find a store; return a new directory in it."""
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    return Location.parse(store.new_url())


@pytest.fixture(params=PLACES)
def root(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Location:
    """A new directory at each kind of place."""
    if request.param == "file":
        return Location.parse(tmp_path / "root")
    if request.param == "memory":
        return Location.parse(f"memory://{tmp_path.name}/root")
    return connect(request.getfixturevalue(STORES[request.param]), monkeypatch)


@pytest.fixture(params=ALL_STORES)
def store(request: pytest.FixtureRequest) -> Store:
    """Each real store."""
    return request.getfixturevalue(STORES[request.param])


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Clients that repeat a failed request at once."""
    monkeypatch.setattr(store_client, "FIRST_BACKOFF", timedelta(milliseconds=1))
    store_client.open_store.cache_clear()
    yield
    store_client.open_store.cache_clear()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Clients that give up soon; tests of errors need not wait for all attempts."""
    monkeypatch.setattr(store_client, "MAX_RETRIES", 2)
    for module in ("presage.schemas.storage.location", "presage.schemas.storage.store_client"):
        monkeypatch.setattr(f"{module}.RETRY_SEC", 0)
    store_client.open_store.cache_clear()
    yield
    store_client.open_store.cache_clear()


def paths(entries: list[Any]) -> list[str]:
    return [entry.path for entry in entries]


# Laws.


def test_file_that_was_written_is_read_and_replaced(root: Location) -> None:
    file = root / "a" / "b.bin"
    assert (file.stat(), file.exists(), (root / "a").exists()) == (None, False, False)
    with pytest.raises(FileNotFoundError):
        file.read_bytes()
    for data in (b"first", b"", bytes(range(256)) * 10):
        file.write_bytes(data)
        assert file.read_bytes() == data
        assert file.num_bytes() == len(data)
    assert (file.exists(), (root / "a").exists()) == (True, True)
    entry = file.stat()
    assert entry is not None
    assert abs(entry.modified - datetime.now(UTC)) < timedelta(minutes=1)
    (root / "text").write_bytes("Grüße".encode())
    assert (root / "text").read_text() == "Grüße"


def test_ranges_are_those_of_the_bytes(root: Location) -> None:
    rng = random.Random(3)
    data = rng.randbytes(5_000)
    (root / "file").write_bytes(data)
    for _ in range(20):
        ends = [sorted(rng.choices(range(len(data) + 1), k=2)) for _ in range(rng.randrange(6))]
        ranges = [(start, end) for start, end in ends]
        assert (root / "file").read_ranges(ranges) == [data[s:e] for s, e in ranges]
    with pytest.raises(FileNotFoundError):
        (root / "none").read_ranges([(0, 1)])


@pytest.mark.parametrize("beyond", [(4_990, 5_001), (6_000, 6_001)])
def test_range_beyond_the_end_is_refused(root: Location, beyond: tuple[int, int]) -> None:
    (root / "file").write_bytes(b"x" * 5_000)
    with pytest.raises(StorageError, match=r"; restore it$"):
        (root / "file").read_ranges([(0, 5), beyond])


def test_entries_are_all_files_below_a_directory_in_order(root: Location) -> None:
    names = ["a", "b/c", "b/c-d", "b/cc/d", "b0", "é", "x y%41+&=~!", "_manifests/0001.json"]
    for name in names:
        (root / name).write_bytes(name.encode())
    (root.parent / f"{root.name}-other").write_bytes(b"beside")
    assert paths(root.entries()) == sorted(names)
    for name in (*names, "b/", "0", "zz"):
        assert paths(root.entries(after=name)) == sorted(n for n in names if n > name)
    assert paths((root / "b").entries()) == ["c", "c-d", "cc/d"]
    assert [e.num_bytes for e in root.entries()] == [len(n.encode()) for n in sorted(names)]
    assert all((root / name).read_bytes() == name.encode() for name in names)
    assert (root / "none").entries() == []


@pytest.mark.slow
@pytest.mark.parametrize("fixture", STORES.values())
def test_listing_of_several_pages_is_complete(
    fixture: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = connect(request.getfixturevalue(fixture), monkeypatch)
    names = [f"{number:05}" for number in range(1_050)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: (root / name).write_bytes(b"x"), names))
    assert paths(root.entries()) == names
    assert paths(root.entries(after="00500")) == names[501:]
    assert root.remove_all() == 1_050
    assert root.entries() == []


def test_removed_files_are_gone_and_missing_ones_are_ignored(root: Location) -> None:
    for name in ("a", "b/c", "b/d"):
        (root / name).write_bytes(b"123")
    root.remove(["a", "none", "b/none"])
    assert paths(root.entries()) == ["b/c", "b/d"]
    root.remove([])
    assert (root / "b").remove_all() == 6
    assert (root.entries(), root.exists()) == ([], False)
    assert root.remove_all() == 0


def test_files_that_two_processes_remove_at_once_are_gone(root: Location) -> None:
    names = [f"{number:03}" for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: (root / name).write_bytes(b"x"), names))
        list(pool.map(lambda _: root.remove(names), range(4)))
    assert root.entries() == []


def test_copied_file_is_equal_and_independent(root: Location, tmp_path: Path) -> None:
    data = random.Random(8).randbytes(10_000)
    (root / "a" / "source").write_bytes(data)
    (root / "b" / "copy").copy_from(root / "a" / "source")
    (root / "b" / "copy").copy_from(root / "a" / "source")
    (root / "a" / "source").write_bytes(b"changed")
    assert (root / "b" / "copy").read_bytes() == data
    outside = Location.parse(tmp_path / "outside")
    outside.copy_from(root / "b" / "copy")
    (root / "c").copy_from(outside)
    assert (root / "c").read_bytes() == outside.read_bytes() == data
    for source in (root / "none", Location.parse(tmp_path / "none")):
        with pytest.raises(FileNotFoundError):
            (root / "d").copy_from(source)
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    (tmp_path / "folder" / "sub" / "file").write_bytes(b"moved")
    (root / "e").move_from(tmp_path / "folder")
    assert (root / "e" / "sub" / "file").read_bytes() == b"moved"
    assert not (tmp_path / "folder").exists()
    assert paths(root.entries()) == ["a/source", "b/copy", "c", "e/sub/file"]


def test_file_is_copied_between_stores_in_chunks(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(9).randbytes(10_000)
    (root / "source").write_bytes(data)
    other = Location.parse(f"memory://{uuid.uuid4().hex}")
    with monkeypatch.context() as patch:
        patch.setattr("presage.schemas.storage.location.CHUNK_BYTES", 3_000)
        patch.delattr(Location, "write_bytes")  # of whole files
        (other / "copy").copy_from(root / "source")
        (root / "back").copy_from(other / "copy")
    assert (other / "copy").read_bytes() == (root / "back").read_bytes() == data


def test_open_file_is_read_and_sought(root: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("presage.schemas.storage.location._READ_BYTES", 100)
    data = random.Random(9).randbytes(1_000)
    (root / "file").write_bytes(data)
    rng = random.Random(10)
    with (root / "file").open() as file:
        for _ in range(50):
            start, size = rng.randrange(1_100), rng.randrange(300)
            assert file.seek(start) == start
            assert file.read(size) == data[start : start + size]
        assert file.seek(-10, os.SEEK_END) == 990
        assert file.read() == data[-10:]
    with pytest.raises(FileNotFoundError):
        (root / "none").open()


def test_children_are_those_of_one_level(root: Location) -> None:
    assert root.children() == ([], [])
    for name in ("b", "a/c", "a/d/e", "f/g"):
        (root / name).write_bytes(b"x")
    assert root.children() == (["a", "f"], ["b"])
    assert (root / "a").children() == (["d"], ["c"])


def test_copies_of_files_and_directories_are_equal(
    root: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("presage.schemas.storage.location.CHUNK_BYTES", 3)
    with new_folder(root / "a") as folder:
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "b").mkdir()
        for name, data in (("MANIFEST.json", b"{}"), ("b/c", b"1234567"), ("d", b"")):
            (folder / name).write_bytes(data)
    assert paths((root / "a").entries()) == ["MANIFEST.json", "b/c", "d"]
    assert b"".join((root / "a/b/c").chunks(7)) == b"1234567"
    with local_copy(root / "a") as folder, local_copy(root / "a/b/c") as file:
        assert (folder / "b" / "c").read_bytes() == file.read_bytes() == b"1234567"
        assert (folder / "d").read_bytes() == b""
    with local_copy(root / "none") as folder:
        assert not folder.exists()
    with local_copy(tmp_path) as folder:
        assert folder == tmp_path


def test_error_of_a_copy_names_its_source(root: Location) -> None:
    (root / "a/b").write_bytes(b"x")

    def fail() -> None:
        with local_copy(root / "a") as folder:
            raise SchemaError("file is damaged; restore it", file=str(folder / "b"))

    with pytest.raises(SchemaError, match=re.escape(f"file is damaged in {root}/a/b; restore it")):
        fail()


def test_large_file_is_uploaded_in_parts(root: Location, tmp_path: Path) -> None:
    data = random.Random(5).randbytes(20_000_000)
    (tmp_path / "local").write_bytes(data)
    (root / "large").upload(tmp_path / "local")
    assert (root / "large").read_bytes() == data
    assert (root / "large").read_ranges([(19_999_990, 20_000_000)]) == [data[-10:]]
    (tmp_path / "local").write_bytes(b"")
    (root / "large").upload(tmp_path / "local")
    assert (root / "large").num_bytes() == 0


def test_new_file_is_there_after_the_body_only(root: Location) -> None:
    with (root / "a" / "new").new_file() as path:
        path.write_bytes(b"part")
        assert root.entries() == []
        path.write_bytes(b"complete")
    assert (root / "a" / "new").read_bytes() == b"complete"
    with suppress(ZeroDivisionError), (root / "a" / "failed").new_file() as path:
        path.write_bytes(b"part" * (1 // 0))
    assert paths(root.entries()) == ["a/new"]


def test_store_has_a_clock_and_conditional_puts_and_keeps_no_trace(root: Location) -> None:
    check_conditional_put(root)
    assert abs(store_time(root) - datetime.now(UTC)) < timedelta(minutes=1)
    assert root.entries() == []


def test_bucket_is_a_directory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    root = connect(store, monkeypatch)
    (root / "file").write_bytes(b"x")
    assert root.parent.parent == root.parent
    assert root.parent.stat() is None
    assert root.parent.exists()


def test_location_is_pickled(root: Location) -> None:
    (root / "a").write_bytes(b"1")
    copy = pickle.loads(pickle.dumps(root))
    assert copy == root
    assert (copy / "a").read_bytes() == b"1"
    error = pickle.loads(pickle.dumps(StorageError("store failed; wait", file=root.url)))
    assert str(error) == f"store failed in {root.url}; wait"


# Conditional puts.


def test_file_is_created_once(root: Location) -> None:
    file = root / "_manifests" / "1.json"
    assert [file.create(b"one"), file.create(b"two"), file.create(b"one")] == [True, False, True]
    assert file.read_bytes() == b"one"
    assert paths(root.entries()) == ["_manifests/1.json"]


def winners(files: list[Location], create: Callable[[Location, bytes], bool]) -> None:
    """Let writers create each file at once; exactly one succeeds, and the file is its."""
    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        for file in files:
            barrier = threading.Barrier(NUM_WRITERS)

            def race(writer: int, file: Location = file, barrier: Any = barrier) -> bool:
                barrier.wait()
                return create(file, f"writer {writer}".encode())

            won = [n for n, created in enumerate(pool.map(race, range(NUM_WRITERS))) if created]
            assert len(won) == 1
            assert file.read_bytes() == f"writer {won[0]}".encode()


def test_exactly_one_of_many_threads_creates_a_file(root: Location) -> None:
    winners([root / f"{number}" for number in range(3)], Location.create)


RACE = """
import sys
from presage.schemas.storage.location import Location
for line in sys.stdin:
    url = line.strip()
    print(url, Location.parse(url).create(sys.argv[1].encode()), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["file", *STORES])
def test_exactly_one_of_many_processes_creates_a_file(
    place: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Location.parse(tmp_path)
    if place != "file":
        root = connect(request.getfixturevalue(STORES[place]), monkeypatch)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(NUM_PROCESSES)
    ]
    lines = "".join(f"{root / str(number)}\n" for number in range(20))
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        outputs = list(pool.map(lambda writer: writer.communicate(lines)[0], writers))
    for number in range(20):
        file = root / str(number)
        won = [n for n, output in enumerate(outputs) if f"{file} True\n" in output]
        assert len(won) == 1
        assert file.read_bytes() == str(won[0]).encode()


@pytest.mark.slow
@pytest.mark.usefixtures("short_pauses")
def test_exactly_one_writer_succeeds_through_drawn_faults(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(seed=7)
    with store.behind_proxy(faults) as behind:
        root = connect(behind, monkeypatch)
        faults.rates = dict.fromkeys(FAULTS, 0.08)
        files = [root / str(number) for number in range(3)]
        with ThreadPoolExecutor(NUM_WRITERS) as pool:
            results = [
                list(pool.map(lambda n, file=file: file.create(f"{n}".encode()), range(16)))
                for file in files
            ]
        faults.rates = {}
        assert set(faults.counts) == set(FAULTS)
        for file, created in zip(files, results, strict=True):
            assert [f"{n}".encode() for n, won in enumerate(created) if won] == [file.read_bytes()]


@pytest.mark.slow
def test_file_that_is_emptied_while_it_is_read_is_read_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    with store.behind_proxy(faults) as behind, ThreadPoolExecutor(1) as pool:
        file = connect(behind, monkeypatch) / "a"
        file.write_bytes(b"0123456789" * 100)
        faults.script = [("GET", "cut_body")]
        reading = pool.submit(file.read_bytes)
        while not faults.counts["cut_body"]:
            time.sleep(0.001)
        faults.latency_sec = 0.3  # of the write, and then of the request for the rest
        file.write_bytes(b"")
        assert reading.result() == b""


@pytest.mark.slow
@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("fault", FAULTS)
def test_each_operation_survives_each_fault(
    store: Store, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request of the operation has the fault; multi-part uploads, each of three."""
    (tmp_path / "large").write_bytes(b"x" * (9 << 20))
    faults = Faults()
    with store.behind_proxy(faults) as behind:
        root = connect(behind, monkeypatch)
        (root / "a").write_bytes(b"0123456789")

        def remove(name: str) -> list[str]:
            (root / name).write_bytes(b"1")
            faults.script = [("", fault)]
            root.remove([name])
            return paths(root.entries())

        operations: dict[str, tuple[Callable[[], Any], Any]] = {
            "read": ((root / "a").read_bytes, b"0123456789"),
            "ranges": (lambda: (root / "a").read_ranges([(0, 2), (9, 10)]), [b"01", b"9"]),
            "size": ((root / "a").num_bytes, 10),
            "list": (lambda: paths(root.entries()), ["a"]),
            "write": (lambda: (root / "b").write_bytes(b"1"), None),
            "read of the written": ((root / "b").read_bytes, b"1"),
            "create": (lambda: (root / "c").create(b"1"), True),
            "create again": (lambda: (root / "c").create(b"2"), False),
            "remove": (lambda: remove("c"), ["a", "b"]),
        }
        for name, (operation, expected) in operations.items():
            faults.script = [("", fault)]
            assert operation() == expected, name
            assert faults.script == [], name
        for request in ("POST", "partNumber=2", "uploadId"):
            faults.script = [(request, fault)] if store.scheme != "az" else [("comp=block", fault)]
            (root / "large").upload(tmp_path / "large")
            assert (root / "large").num_bytes() == 9 << 20


def test_store_that_ignores_the_condition_is_refused(
    gcs_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    with gcs_store.behind_proxy(faults) as behind:
        root = connect(behind, monkeypatch)
        check_conditional_put(root)
        faults.ignore_conditions = True
        with pytest.raises(StorageError, match=r"ignores the condition.*see docs/storage\.md") as e:
            check_conditional_put(root)
        assert root.url in str(e.value)
        faults.ignore_conditions = False
        assert root.entries() == []


@pytest.mark.usefixtures("impatient")
def test_bare_emulator_of_gcs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gcs_server(tmp_path) as endpoint:
        root = connect(Store("gs", endpoint), monkeypatch)
        with pytest.raises(StorageError, match="unknown"):
            check_conditional_put(root)


# Errors.


def one_line(error: pytest.ExceptionInfo[SchemaError], url: str) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert url in text
    return text


OPERATIONS: dict[str, Callable[[Location], Any]] = {
    "read": lambda root: (root / "a").read_bytes(),
    "ranges": lambda root: (root / "a").read_ranges([(0, 1)]),
    "size": lambda root: (root / "a").num_bytes(),
    "exists": lambda root: (root / "a").exists(),
    "list": lambda root: root.entries(),
    "write": lambda root: (root / "a").write_bytes(b"1"),
    "create": lambda root: (root / "a").create(b"1"),
    "remove": lambda root: root.remove(["a"]),
    "probe": check_conditional_put,
    "time": store_time,
}


@pytest.mark.parametrize(
    ("fixture", "variable", "value"),
    [
        ("s3_store", "AWS_ACCESS_KEY_ID", "nobody"),
        ("s3_store", "AWS_SECRET_ACCESS_KEY", SECRET_KEY[::-1]),
        ("azure_store", "AZURE_STORAGE_KEY", "d3Jvbmc="),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_wrong_credentials_are_refused_in_one_line(
    fixture: str,
    variable: str,
    value: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = connect(request.getfixturevalue(fixture), monkeypatch)
    monkeypatch.setenv(variable, value)
    for name, operation in OPERATIONS.items():
        if (value, name) == ("nobody", "size"):
            continue  # versitygw replies 404 instead of 403, and HEAD has no body with the reason
        with pytest.raises(StorageError) as error:
            operation(root)
        text = one_line(error, root.url)
        assert text.startswith("store refuses access: "), f"{name}: {text}"
        assert text.endswith("; check the credentials")


def test_missing_bucket_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(store, monkeypatch)
    root = Location.parse(f"{store.scheme}://missing/dataset")
    for name in ("list", "write", "create", "probe", "time", "exists"):
        with pytest.raises(StorageError) as error:
            OPERATIONS[name](root)
        assert one_line(error, root.url).startswith("bucket does not exist in "), name


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_unreachable_endpoint_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    root = connect(Store(store.scheme, "http://127.0.0.1:1"), monkeypatch)
    for operation in OPERATIONS.values():
        with pytest.raises(StorageError) as error:
            operation(root)
        text = one_line(error, root.url)
        assert "http://127.0.0.1:1/" in text
        assert text.endswith("reachable")


@contextmanager
def replies(reply: Callable[[str, str], tuple[int, dict[str, str], bytes]]) -> Generator[str]:
    """Run a server that answers each method and path by a function; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, body = reply(self.command, self.path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_any_reply_of_a_store_gives_a_value_or_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    answer: list[Any] = [200, {}, b""]
    with replies(lambda method, path: tuple(answer)) as address:  # type: ignore[arg-type]
        stores = [Store(scheme, address) for scheme in STORES]
        roots = [connect(store, monkeypatch) for store in stores]
        pieces = st.sampled_from(
            ["<ListBucketResult>", "<Contents><Key>a</Key>", "<Size>-1</Size>", "</x>", "\0", "{"]
        )

        @given(
            status=st.sampled_from([200, 204, 206, 301, 304, 400, 403, 404, 409, 412, 416]),
            headers=st.dictionaries(
                st.sampled_from(["ETag", "Last-Modified", "Content-Range", "Location"]),
                st.sampled_from(["x", '"x"', "Thu, 01 Jan 1970 00:00:00 GMT", "bytes 0-1/2", "/"]),
            ),
            body=st.lists(pieces | st.text(max_size=20)).map("".join),
            name=st.sampled_from(sorted(set(OPERATIONS) - {"create", "probe"})),
            root=st.sampled_from(roots),
        )
        def check(
            status: int, headers: dict[str, str], body: str, name: str, root: Location
        ) -> None:
            answer[:] = status, headers, b"" if status in (204, 304) else body.encode()
            text = root.url
            try:
                OPERATIONS[name](root)
            except FileNotFoundError:
                pass
            except StorageError as error:
                text = str(error)
            assert root.url in text
            assert "\n" not in text

        monkeypatch.setattr(store_client, "ATTEMPTS", 1)
        check()


LISTING = (
    """<ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>{}</ListBucketResult>"""
)
LISTED = """<Contents><Key>{}</Key><Size>{}</Size>
<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"""


@pytest.mark.usefixtures("impatient")
def test_objects_that_show_directories_are_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A console makes `name/` for a directory."""
    sizes = {"r/": 0, "r/a/": 0, "r/a-b": 0, "r/a/b/": 0, "r/a/b/file": 1, "r/empty": 0}
    body = LISTING.format("".join(LISTED.format(*item) for item in sizes.items())).encode()
    with replies(lambda method, path: (200, {}, body)) as address:
        connect(Store("s3", address), monkeypatch)
        root = Location.parse("s3://b/r")
        assert paths(root.entries()) == ["a-b", "a/b/file", "empty"]
        assert root.name not in root.children()[1]


@pytest.mark.usefixtures("impatient")
def test_key_with_an_empty_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    body = LISTING.format(LISTED.format("r//x", 1)).encode()
    with replies(lambda method, path: (200, {}, body)) as address:
        connect(Store("s3", address), monkeypatch)
        with pytest.raises(StorageError) as error:
            Location.parse("s3://b/r").entries()
    assert '"r//x" contained empty path segment' in one_line(error, "s3://b/r")


# Credentials.


def no_credentials(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    for name in store_client.CREDENTIALS[scheme]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent")


MISSING = {
    "s3": ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://{}", "AWS_ACCESS_KEY_ID"),
    "gs": ("GCE_METADATA_HOST", "{}", "GOOGLE_APPLICATION_CREDENTIALS"),
    "az": ("AZURE_MSI_ENDPOINT", "http://{}/token", "AZURE_STORAGE_KEY"),
}


@pytest.mark.parametrize("scheme", MISSING)
@pytest.mark.timeout(30)  # it does not wait for all attempts
def test_machine_without_credentials_says_so_at_once(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable, address, advice = MISSING[scheme]
    no_credentials(monkeypatch, scheme)
    monkeypatch.setenv(variable, address.format("127.0.0.1:1"))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
    root = Location.parse(f"{scheme}://without-credentials/x")
    with pytest.raises(StorageError, match=f"no credentials found, set {advice}") as error:
        root.entries()
    assert one_line(error, f"{scheme}://without-credentials").endswith("; see docs/storage.md")


@pytest.mark.parametrize(
    ("scheme", "variables", "message"),
    [
        ("gs", {"GOOGLE_APPLICATION_CREDENTIALS": "{folder}/none"}, "none"),
        ("gs", {"GOOGLE_APPLICATION_CREDENTIALS": "{folder}/external.json"}, "external_account"),
        ("gs", {"GOOGLE_APPLICATION_CREDENTIALS": "{folder}/torn.json"}, "ecode"),
        ("s3", {"AWS_ACCESS_KEY_ID": "alone"}, "SecretAccessKey"),
        ("az", {"AZURE_STORAGE_KEY": "a2V5"}, "Account"),
        ("az", {"AZURE_STORAGE_KEY": "no base64", "AZURE_STORAGE_ACCOUNT": "account"}, "nvalid"),
    ],
)
def test_incomplete_credentials_are_named_in_one_line(
    scheme: str,
    variables: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "external.json").write_text('{"type": "external_account"}')
    (tmp_path / "torn.json").write_text('{"type": "autho')
    no_credentials(monkeypatch, scheme)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(folder=tmp_path))
    store_client.open_store.cache_clear()
    with pytest.raises(StorageError, match=message) as error:
        Location.parse(f"{scheme}://incomplete/x").entries()
    text = one_line(error, f"{scheme}://incomplete")
    assert text.startswith("store cannot be used: ")
    assert text.endswith("; see docs/storage.md")


def test_credentials_of_the_machine_are_asked_for(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    keys = s3_store.environment
    body = {
        "AccessKeyId": keys["AWS_ACCESS_KEY_ID"],
        "SecretAccessKey": keys["AWS_SECRET_ACCESS_KEY"],
        "Token": "",
        "Expiration": "2099-01-01T00:00:00Z",
    }

    def reply(method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        asked.append(f"{method} {path}")
        if path.endswith("/role"):
            return 200, {}, json.dumps(body).encode()
        return 200, {}, b"role" if path.endswith("/") else b"token"

    connect(s3_store, monkeypatch)
    no_credentials(monkeypatch, "s3")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with replies(reply) as address:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", address)
        store_client.open_store.cache_clear()
        assert Location.parse(s3_store.new_url()).entries() == []
    assert [path.partition("/latest")[2] for path in asked] == [
        "/api/token",
        "/meta-data/iam/security-credentials/",
        "/meta-data/iam/security-credentials/role",
    ]
    store_client.open_store.cache_clear()


def test_connection_string_of_azure_is_used(
    azure_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = azure_store.environment
    parts = {
        "DefaultEndpointsProtocol": "http",
        "AccountName": variables["AZURE_STORAGE_ACCOUNT"],
        "AccountKey": variables["AZURE_STORAGE_KEY"],
        "BlobEndpoint": variables["AZURE_STORAGE_ENDPOINT"],
    }
    text = ";".join(f"{name}={value}" for name, value in parts.items())
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    store_client.open_store.cache_clear()
    assert Location.parse(azure_store.new_url()).entries() == []
    store_client.open_store.cache_clear()


# Processes.


def child_result(root: Location) -> bytes:
    """Fork; return what the child reads of a file, or its error."""
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            text = (root / "a").read_bytes()
        except BaseException as error:
            text = str(error).encode()
        os.write(start, text)
        os._exit(0)
    os.close(start)
    with os.fdopen(end, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


FORKED = """
import sys
from presage.schemas.storage.location import Location
from tests.schemas.test_storage import child_result
root = Location.parse(sys.argv[1])
print(child_result(root))
(root / "a").read_bytes()
print(child_result(root))
print((root / "a").read_bytes())
"""


@pytest.mark.slow
def test_forked_process_uses_a_store_only_before_its_parent(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = connect(s3_store, monkeypatch)
    (root / "a").write_bytes(b"content")
    done = subprocess.run(
        [sys.executable, "-c", FORKED, root.url],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    before, after, parent = done.stdout.splitlines()
    assert (before, parent) == ("b'content'", "b'content'")
    assert f"forked from one that uses an object store in s3://{BUCKET}; start it by" in after


# Paths and URLs.


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("/a/../b//c/", "/b/c"),
        ("//a", "/a"),
        ("file:///a/b%20c", "/a/b c"),
        ("file://localhost/a", "/a"),
        ("file:/a", "/a"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket//a/./b/", "s3://bucket/a/b"),
        ("gs://bucket/a b%20?c#d", "gs://bucket/a b%20?c#d"),
    ],
)
def test_url_is_normalised(text: str, url: str) -> None:
    assert Location.parse(text) == Location(url)
    assert Location.parse(Location(url)) == Location(url)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "path is empty or has a null byte: ''; name a directory"),
        ("a\0b", "path is empty or has a null byte: 'a\\x00b'; name a directory"),
        (
            "s3a://b/c",
            "scheme is unknown: 's3a' in s3a://b/c; use a path or file://, s3://, gs://,",
        ),
        ("s3:/bucket/a", "URL lacks a slash in s3:/bucket/a; write s3://bucket/a"),
        ("s3://", "URL has no bucket in s3://; write s3://BUCKET/PATH"),
        ("az:///a", "URL has no bucket in az:///a; write az://BUCKET/PATH"),
        ("s3://b/a/../c", "URL contains '..' in s3://b/a/../c; write the path without it"),
        ("file://host/a", "file URL names a host: 'host' in file://host/a; write file:///PATH"),
    ],
)
def test_odd_url_is_refused_with_a_way_out(text: str, message: str) -> None:
    with pytest.raises(StorageError) as error:
        Location.parse(text)
    assert str(error.value).startswith(message)


PIECES = st.sampled_from(["s3", "gs", "file", "memory", "://", ":", "/", "//", ".", "..", "%2F"])


@given(st.lists(PIECES | st.text(max_size=3)).map("".join), st.text("abc./ é", min_size=1))
def test_any_text_is_a_normalised_location_or_refused(text: str, name: str) -> None:
    try:
        location = Location.parse(text)
    except StorageError:
        reject()
    assert Location.parse(str(location)) == location
    assert not location.url.endswith("/") or location.url == "/"
    assert (location.local is None) == ("://" in location.url)
    assert location.parent.parent.parent.url in location.url
    if "/" not in name and name not in (".", ".."):
        assert (location / name).parent == location
        assert (location / name).name == name


@given(
    st.sets(
        st.lists(st.text("ab .%~é\u4e00#?+", min_size=1, max_size=4), min_size=1, max_size=3).map(
            "/".join
        )
    )
)
def test_any_names_are_listed_as_written(names: set[str]) -> None:
    names = {n for n in names if not {".", ".."} & set(n.split("/"))}
    root = Location.parse(f"memory://names/{random.Random(str(sorted(names))).randrange(1 << 60)}")
    for name in names:
        (root / name).write_bytes(name.encode())
    assert paths(root.entries()) == sorted(names)
    assert all((root / name).read_bytes() == name.encode() for name in names)
    root.remove_all()
    assert root.entries() == []


def test_memory_is_kept_by_bucket() -> None:
    (Location.parse("memory://one/a")).write_bytes(b"1")
    assert Location.parse("memory://one/a").read_bytes() == b"1"
    assert Location.parse("memory://two").entries() == []


# Local files.


def test_local_listing_leaves_out_incomplete_and_dangling_files(tmp_path: Path) -> None:
    (tmp_path / ".a.0.partial").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "line\nbreak").touch()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).touch()
    assert paths(Location.parse(tmp_path).entries()) == ["b/line\nbreak", "\udcff"]


def test_killed_writers_leave_no_file_and_removal_takes_their_rests(tmp_path: Path) -> None:
    root = Location.parse(tmp_path / "root")
    code = "import os, sys; from presage.schemas.storage.location import Location\n" + (
        "with Location.parse(sys.argv[1]).new_file() as p: p.write_text('x'); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(root / "a")], check=False)
    assert done.returncode == 9
    assert len(list((tmp_path / "root").iterdir())) == 1
    assert root.entries() == []
    root.remove_all()
    assert not (tmp_path / "root").exists()


def test_filesystem_without_hard_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageError) as error:
        Location.parse(tmp_path / "a").create(b"1")
    assert str(error.value) == (
        f"file cannot be created: Operation not permitted in {tmp_path}/a; commits need a "
        "filesystem with hard links"
    )
    assert list(tmp_path.iterdir()) == []


def test_command_that_needs_a_local_path_says_so(tmp_path: Path) -> None:
    assert os.fspath(Location.parse(tmp_path)) == str(tmp_path)
    with pytest.raises(StorageError, match="needs a local path in s3://b/a; copy the files"):
        os.fspath(Location.parse("s3://b/a"))
