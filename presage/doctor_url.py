"""`presage doctor --url`: check that datasets and runs can be kept at a URL, each with its fix.

The checks write, read, list and remove files of their own below the URL, and leave nothing behind.
The first that fails is the last: the others would fail for the same reason.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from presage.doctor import CheckResult, nearest_folder
from presage.schemas.storage.location import Location, StorageError
from presage.schemas.storage.probes import check_conditional_put, store_time

MAX_LATENCY_MS = 200.0
"""Median duration of a small request that is tolerated; within a region it is 10 to 50 ms."""
MAX_SKEW_SEC = 60.0
"""Tolerated difference of the clocks; leases allow for more."""
NUM_REQUESTS = 9
"""Requests of which the median is taken."""
DATA = bytes(range(256)) * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlCheck:
    """One check of a directory that the checks share.

    Attributes:
        probe: given the directory and a clock in seconds since 1970, returns whether the
            requirement is met, and what was found; raises StorageError or OSError if the store
            fails.
    """

    name: str
    probe: Callable[[Location, Callable[[], float]], tuple[bool, str]]
    must: str
    fix: str


def examine_url(url: str, clock: Callable[[], float] = time.time) -> Iterator[CheckResult]:
    """Yield the findings about a URL or path, up to the first that is not ok."""
    try:
        with _scratch_directory(Location.parse(url)) as directory:
            for check in CHECKS:
                try:
                    ok, found = check.probe(directory, clock)
                except (StorageError, OSError) as error:
                    ok, found = False, " ".join(str(error).split())
                name = f"url {check.name}"
                yield CheckResult(name=name, ok=ok, must=check.must, found=found, fix=check.fix)
                if not ok:
                    return
    except (StorageError, OSError) as error:
        yield CheckResult(
            name="url",
            ok=False,
            must="be a path or URL at which files can be created",
            found=" ".join(str(error).split()),
            fix="see docs/storage.md",
        )


@contextmanager
def _scratch_directory(root: Location) -> Generator[Location]:
    """Yield a new directory below a location, or below the nearest that exists; then remove it."""
    if root.local is not None:
        folder = tempfile.mkdtemp(prefix="doctor-", dir=nearest_folder(root.local))
        try:
            yield Location.parse(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # a check has removed it
        return
    directory = root / f"doctor-{uuid.uuid4().hex}"
    try:
        yield directory
    finally:
        with suppress(StorageError):  # a finding has reported it
            directory.remove_all()


def _probe_list(directory: Location, clock: Callable[[], float]) -> tuple[bool, str]:
    return True, "files" if directory.parent.exists() else "no files yet"


def _probe_write(directory: Location, clock: Callable[[], float]) -> tuple[bool, str]:
    (directory / "file").write_bytes(DATA)
    return True, f"{len(DATA)} bytes"


def _probe_read(directory: Location, clock: Callable[[], float]) -> tuple[bool, str]:
    file = directory / "file"
    is_equal = file.read_bytes() == DATA and file.read_ranges([(9, 99)]) == [DATA[9:99]]
    return is_equal, "the same bytes" if is_equal else "other bytes"


def _probe_condition(directory: Location, clock: Callable[[], float]) -> tuple[bool, str]:
    check_conditional_put(directory)
    return True, "one of two puts succeeds"


def _probe_latency(directory: Location, clock: Callable[[], float]) -> tuple[bool, str]:
    times: list[float] = []
    for _ in range(NUM_REQUESTS):
        start = time.perf_counter()
        (directory / "file").stat()
        times.append(1000 * (time.perf_counter() - start))
    median = statistics.median(times)
    return median <= MAX_LATENCY_MS, f"{median:.1f} ms"


def _probe_clock(directory: Location, clock: Callable[[], float]) -> tuple[bool, str]:
    """Compare times; that of the store is rounded down to a second."""
    before = clock()
    earliest = store_time(directory)
    latest = earliest + timedelta(seconds=1)
    after = clock()
    ahead, behind = earliest.timestamp() - after, before - latest.timestamp()
    skew = max(ahead, behind, 0.0)
    direction = "" if skew == 0 else " ahead" if ahead > behind else " behind"
    return skew <= MAX_SKEW_SEC, f"{skew:.1f} s{direction}"


def _probe_delete(directory: Location, clock: Callable[[], float]) -> tuple[bool, str]:
    directory.remove_all()
    left = [entry.path for entry in directory.entries()]
    return not left, "nothing is left" if not left else f"{', '.join(left)} is left"


CHECKS = (
    UrlCheck(
        name="list",
        probe=_probe_list,
        must="be listed",
        fix="create the bucket, and let this user list it (s3:ListBucket, storage.objects.list)",
    ),
    UrlCheck(
        name="write",
        probe=_probe_write,
        must="accept files",
        fix="let this user write (s3:PutObject, storage.objects.create)",
    ),
    UrlCheck(
        name="read",
        probe=_probe_read,
        must="return what was written",
        fix="let this user read (s3:GetObject, storage.objects.get)",
    ),
    UrlCheck(
        name="conditional put",
        probe=_probe_condition,
        must="create a file only if it does not exist",
        fix="use a store that supports conditional puts, see docs/storage.md",
    ),
    UrlCheck(
        name="latency",
        probe=_probe_latency,
        must=f"be at most {MAX_LATENCY_MS:g} ms",
        fix="run in the region of the bucket",
    ),
    UrlCheck(
        name="clock",
        probe=_probe_clock,
        must=f"agree with this machine to {MAX_SKEW_SEC:g} s",
        fix="synchronize this machine (chronyc tracking, timedatectl)",
    ),
    UrlCheck(
        name="delete",
        probe=_probe_delete,
        must="remove files",
        fix="let this user delete (s3:DeleteObject, storage.objects.delete)",
    ),
)
