"""A dataset under drawn commands, crashes, concurrent writers and readers, beside its model."""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import presage
from presage.pipelines.build import build
from presage.pipelines.quality.gate import GateError
from presage.pipelines.table import commit as commit_module
from presage.pipelines.table.commit import seal
from presage.pipelines.table.compact import CompactionRequest, compact_dataset
from presage.pipelines.table.delete import erase
from presage.pipelines.table.expand import VIEW, view_sql
from presage.pipelines.table.indexes import PartBuilder, add_index, segment_of_part
from presage.pipelines.table.root import MIN_AGE
from presage.pipelines.table.vacuum import vacuum
from presage.pipelines.table.verify import verify
from presage.schemas.dataset import opened as dataset_module
from presage.schemas.dataset.files import find_damaged_files
from presage.schemas.dataset.manifest import ERASED_PREFIX
from presage.schemas.dataset.opened import OpenDataset, open_dataset
from presage.schemas.errors import SchemaError
from presage.schemas.layout import tombstones_path
from presage.schemas.storage.leases import LEASES, Lease
from presage.schemas.storage.local_files import PARTIAL
from presage.schemas.storage.location import Location
from presage.schemas.storage.versions import Versions
from tests.pipelines.appending import addition
from tests.pipelines.logs import IN_PROCESS, age, copy_of, request
from tests.pipelines.table_model import (
    COLUMNS,
    DAYS,
    LOGS,
    SESSIONS,
    USERS,
    Append,
    Command,
    Compact,
    Erase,
    RefusedError,
    Reindex,
    Seal,
    Table,
    Vacuum,
    write_files,
)

FIRST = [Append(f"{day} a", day, replaces=False) for day in DAYS[:2]]
"""The commands that have made the dataset with which each example begins."""
ERRORS = (SchemaError, GateError, ValueError, OSError)
"""Errors that a command reports in one line."""
WRITES = ("write_bytes", "create", "new_file", "copy_from", "remove")
"""Methods of a location by which commands change a dataset."""
ANY, SERIAL = re.compile(""), re.compile(r"/(MANIFEST\.json|job\.yaml|tombstones|_manifests)")
"""Paths of all writes, and of those during which no other thread of a command writes."""
NUM_WRITES = {
    ANY: {Append: 44, Compact: 60, Erase: 8, Reindex: 20, Seal: 5, Vacuum: 8},
    SERIAL: {Append: 8, Compact: 12, Erase: 6, Reindex: 7, Seal: 3, Vacuum: 5},
}


class KilledError(BaseException):
    """Ends the command of a process that is killed."""


@contextmanager
def at_write(paths: re.Pattern[str], number: int, act: Callable[..., None]) -> Iterator[None]:
    """Call a function before the write of some number to some paths.

    It gets the method, the location and the arguments. Once it has raised KilledError, so do all
    further writes.
    """
    numbers, killed = count(), list[KilledError]()

    def write(real: Callable[..., Any], location: Location, *arguments: Any) -> Any:
        if killed and location.name == LEASES:
            return None  # leases of killed commands end when they are collected, or expire
        if killed:
            raise killed[0]
        if paths.search(f"{location.url}/") and next(numbers) == number:
            try:
                act(real, location, *arguments)
            except KilledError as error:
                killed.append(error)
                raise
        return real(location, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        for name in WRITES:
            call = partial(write, getattr(Location, name))
            patch.setattr(Location, name, lambda *given, call=call: call(*given))
        yield


def kill(write: Callable[..., Any], location: Location, *arguments: Any) -> None:
    """Leave half of what a process that is killed has written or removed."""
    if write.__name__ == "remove":
        paths = list(arguments[0])
        write(location, paths[: len(paths) // 2])
    else:
        half = Path(location).with_name(f".{location.name}.{'0' * 32}{PARTIAL}")
        half.parent.mkdir(parents=True, exist_ok=True)
        half.write_bytes(b"half")
    raise KilledError


def fail(write: Callable[..., Any], location: Location, *arguments: Any) -> None:
    raise OSError(28, "no space left on device", location.url)


def fail_late(write: Callable[..., Any], location: Location, *arguments: Any) -> None:
    """Fail after the write."""
    write(location, *arguments)
    fail(write, location)


erasures = st.sampled_from(
    [Erase("session", frozenset({session})) for session in SESSIONS]
    + [Erase("user", frozenset({user})) for user in USERS]
)
appends = st.builds(
    lambda log, day, replaces: Append(log, day or log.partition(" ")[0], replaces),
    st.sampled_from(sorted(LOGS)),
    st.sampled_from((*[None] * 15, *DAYS)),
    st.sampled_from((True, True, False)),
)
compactions = st.builds(
    lambda ids, ages: Compact(ids, *ages),
    st.none() | erasures,
    st.sampled_from(((0, None), (0, None), (5, None), (None, 5), (5, 5))),
)
vacuums = st.sampled_from((Vacuum(0), Vacuum(3), Vacuum(8), Vacuum(8)))
others = st.sampled_from((Seal(True), Seal(False), Seal(False), Reindex()))
commands = st.one_of(*[appends] * 3, erasures, compactions, *[vacuums] * 2, others)
readers = st.sampled_from((*["the same"] * 9, "none", "another", "with a lease", "with a lease"))
numbers = st.sampled_from(range(60))
disturbances = st.one_of(
    st.tuples(
        st.sampled_from((ANY, SERIAL, SERIAL)), numbers, st.sampled_from((kill, fail, fail_late))
    ),
    st.tuples(st.just(SERIAL), numbers, commands),
)


def names_of(dataset: OpenDataset) -> set[str]:
    """Return the directories and files that a version of a dataset needs."""
    tombstones = dataset.manifest.tombstones_sha256
    names = {tombstones_path(tombstones)} if tombstones else set[str]()
    for index in dataset.manifest.indexes:
        names |= {f"{index.id}/{part.directory}" for part in index.parts.values()}
    for segment in dataset.segments:
        names |= {f"segments/{segment.directory.name}", *segment.manifest.fitted}
    return names


def places_in(path: Path) -> dict[str, float]:
    """Return what commands have written, under the names of `names_of`, with the age in days."""
    ages: dict[str, float] = {}
    for file in (file for file in path.rglob("*") if file.is_file()):
        name = file.relative_to(path).as_posix()
        if name.startswith(("segments/", "index-")):
            name = "/".join(name.split("/")[:2])
        elif not (
            name.startswith(("tombstones/", "vocabularies/", ".refused-")) or PARTIAL in name
        ):
            continue
        days = (time.time() - file.stat().st_mtime) / 86_400
        ages[name] = min(days, ages.get(name, days))
    return ages


def content_of(dataset: presage.Dataset) -> object:
    """Return what a reader sees, as `Table.content`."""
    opened, segments = dataset.opened, dict[str | None, object]()
    for segment in opened.segments:
        samples = dataset.select(segments=[segment.id]).to_arrow(COLUMNS).to_pydict()
        files = [segment.file(p).read() for p in segment.files if p.startswith("rejects/")]
        rejects = sorted(position for file in files for position in file["position"].to_pylist())
        assert segment.manifest.num_rejects == len(rejects)
        segments[segment.day] = (
            sorted(zip(*samples.values(), strict=True)),
            segment.manifest.num_rows,
            rejects,
            Counter(segment.tombstones["reason"].to_pylist()),
        )
    indexes = opened.complete_indexes()
    assert len(indexes) == len(opened.manifest.indexes)
    return segments, opened.manifest.sealed, {index.epochs for index in indexes}


class DatasetMachine(RuleBasedStateMachine):
    """A dataset and its model. Time passes by making all files older.

    Attributes:
        now: day of the model's clock.
        names: number of a version to what it needs; not of those that a compaction has removed.
        perhaps_left: what versions needed that a disturbed compaction may have removed.
        times: number of a version to the day of its commit.
        reader: an open dataset with its content, the number of its version and what that needs.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.path = copy_of(folder / "dataset", Path(tempfile.mkdtemp(dir=folder)) / "dataset")
        self.location = Location.parse(self.path)
        self.now, self.counter, self.started = 0, count(), datetime.now(UTC)
        self.names, self.times = dict[int, set[str]](), dict[int, int]()
        self.ids, self.perhaps_left = dict[tuple[str, str], str](), set[str]()
        self.reader: tuple[presage.Dataset, object, int, set[str]] | None = None
        self.lease: Lease | None = None
        self.table = Table()
        for command in FIRST:
            command.apply(self.table, self.now)
        self.check([self.table])
        self.wait(8)

    def teardown(self) -> None:
        self.change_reader("none")

    @rule(
        reader=readers,
        commands=st.tuples(commands, commands, commands),
        disturbance=st.none() | st.none() | disturbances,
    )
    def step(
        self,
        reader: str,
        commands: tuple[Command, ...],
        disturbance: tuple[re.Pattern[str], int, Any] | None,
    ) -> None:
        if reader != "the same":
            self.change_reader(reader)
        command = commands[0]
        if disturbance is not None:
            command = next(filter(self.writes, commands), command)
            self.run_disturbed(command, *disturbance)
        self.run_alone(command)

    def run_alone(self, command: Command) -> None:
        number = self.newest()
        expected, refusal = self.applied(command, self.table)
        try:
            result = self.run(command)
        except ERRORS as error:
            if refusal is None or refusal not in str(error):
                raise
        else:
            assert refusal is None, f"not refused: {refusal}"
            if isinstance(command, Append):
                assert result["built"] == (expected != self.table)
            assert (self.path / VIEW).read_text() == view_sql(open_dataset(self.path))
        removes = refusal is None and isinstance(command, Compact | Vacuum)
        if expected == self.table and not removes:
            assert self.newest() == number
        self.check([expected])
        if removes:
            self.check_removed(isinstance(command, Compact))
        self.check_kept()

    def run_disturbed(
        self,
        command: Command,
        paths: re.Pattern[str],
        number: int,
        disturbance: Command | Callable[..., None],
    ) -> None:
        """Run a command that fails or stands still at one of its writes, during another command.

        It has done all or nothing. Two commands have run in one order or the other; one that has
        stood still for more than a week may be refused.
        """
        other = None if callable(disturbance) else disturbance
        ran = list[bool]()

        def act(*write: Any) -> None:
            ran.append(True)
            if callable(disturbance):
                disturbance(*write)
            else:
                with suppress(*ERRORS):
                    self.run(disturbance)

        first, _ = self.applied(command, self.table)
        with (
            suppress(KilledError, *ERRORS),
            at_write(paths, number % NUM_WRITES[paths][type(command)], act),
        ):
            self.run(command)
        candidates = [first]
        if ran and other is not None:
            second, _ = self.applied(other, self.table)
            candidates = [self.applied(other, first)[0], self.applied(command, second)[0]]
        if ran and other in (None, Vacuum(8)):
            candidates.append(self.table)
        self.check(candidates)
        if any(isinstance(each, Compact) for each in (command, other)):
            self.perhaps_left |= self.forget_replaced()
        self.check_kept()

    def change_reader(self, kind: str) -> None:
        if self.lease is not None:
            self.lease.release()
        self.lease = self.reader = None
        if kind != "none":
            dataset = presage.Dataset(self.path)
            names = names_of(dataset.opened)
            self.reader = dataset, content_of(dataset), self.newest(), names
        if kind == "with a lease":
            self.lease = Lease(self.location, "a reader")
            self.lease.hold(s.directory.name for s in open_dataset(self.path).segments)

    @invariant()
    def reader_keeps_its_version(self) -> None:
        """Without a lease it may lose the files, but never sees others."""
        if self.reader is None:
            return
        dataset, content, number, _ = self.reader
        try:
            indexes = [dataset.opened.open_index(i) for i in dataset.opened.complete_indexes()]
            for each in (*dataset.opened.segments, *(part for i in indexes for part in i.parts)):
                assert find_damaged_files(each.directory, each.files) == []
            assert content_of(dataset) == content
        except (AssertionError, *ERRORS):
            if self.lease is not None or number in self.kept():
                raise
            self.reader = None

    def writes(self, command: Command) -> bool:
        return isinstance(command, Vacuum) or self.applied(command, self.table)[0] != self.table

    def run(self, command: Command) -> Any:
        """Run a command as in a process of its own; return its result."""
        self.clear_caches()
        attempt, at = f"{next(self.counter):012x}", self.started + timedelta(self.now)
        match command:
            case Append(log, day, replaces):
                new = addition(
                    self.folder / "job.yaml", self.folder / log, self.path,
                    attempt=attempt, day=day, replaces=replaces,
                )  # fmt: skip
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(commit_module, "datetime", SimpleNamespace(now=lambda _: at))
                    return build(new)
            case Erase(column):
                return erase(self.location, self.ids_file(command), column, at)
            case Compact(ids, older_than, rejects):
                compaction = CompactionRequest(
                    dataset=self.location,
                    older_than=None if older_than is None else timedelta(older_than),
                    rejects_older_than=None if rejects is None else timedelta(rejects),
                    ids=ids and self.ids_file(ids),
                    column=ids and ids.column,
                    at=at,
                    beam_args=[IN_PROCESS],
                    attempt=attempt,
                )
                return compact_dataset(compaction)
            case Vacuum(days):
                self.wait(days)
                return vacuum(self.location)
            case Seal(is_sealed):
                return seal(self.location, sealed=is_sealed)
            case Reindex():
                order = open_dataset(self.path).order(32, 2, "none", 0)
                builder = PartBuilder(self.location, [IN_PROCESS])
                return add_index(open_dataset(self.path), order, builder)

    def ids_file(self, ids: Erase) -> Path:
        path = self.path.with_name(f"ids-{next(self.counter)}")
        path.write_text("".join(f"{number}\n" for number in sorted(ids.ids)))
        return path

    def applied(self, command: Command, table: Table) -> tuple[Table, str | None]:
        """Return the table after a command, and why it is refused if it is."""
        changed = deepcopy(table)
        try:
            if isinstance(command, Compact) and self.lease is not None:
                raise RefusedError("dataset is in use")
            command.apply(changed, self.now)
        except RefusedError as error:
            return table, str(error)
        return changed, None

    def clear_caches(self) -> None:
        dataset_module.committed_segment.cache_clear()
        dataset_module._committed_part.cache_clear()

    def newest(self) -> int:
        return Versions(self.location).newest_number()

    def wait(self, days: int) -> None:
        self.note_times()
        age(self.path, days * 86_400)
        self.now += days

    def note_times(self) -> None:
        for number in range(1, self.newest() + 1):
            self.times.setdefault(number, self.now)

    def kept(self) -> set[int]:
        """Return the versions that were not replaced a week ago, nor removed by a compaction."""
        self.note_times()
        newest = self.newest()
        old = {n - 1 for n, day in self.times.items() if self.now - day >= MIN_AGE.days}
        return {number for number in self.names if number == newest or number not in old}

    def check(self, candidates: list[Table]) -> None:
        """Check that the dataset is one of some tables, which is its model from now on."""
        self.clear_caches()
        dataset, number = presage.Dataset(self.path), self.newest()
        seen, expected = content_of(dataset), [table.content() for table in candidates]
        assert seen in expected
        matching = [t for t, content in zip(candidates, expected, strict=True) if content == seen]
        lineage, now = dataset.opened.manifest.lineage, {s.id for s in dataset.opened.segments}
        gone = {  # logs whose segment was written again, and then replaced
            log
            for (_, log), segment in self.ids.items()
            if lineage.get(f"{ERASED_PREFIX}{segment}", next(iter(now))) not in now
        }
        erased = self.table.erased | gone
        self.table = deepcopy(min(matching, key=lambda table: len(table.erased ^ erased)))
        if number not in self.names:
            assert verify(self.path)["problems"] == []
        self.names[number] = names_of(dataset.opened)
        days = self.table.days
        ids = {(s.day, days[s.day].log): s.id for s in dataset.opened.segments if s.day}
        for day, log in ids.keys() & self.ids.keys():  # another segment's vocabulary may be named
            days[day].is_rewritten |= ids[day, log] != self.ids[day, log]
        self.ids = ids

    def check_kept(self) -> None:
        """Check that versions have what they need."""
        places = places_in(self.path).keys()
        assert [number for number in self.kept() if not self.names[number] <= places] == []

    def forget_replaced(self) -> set[str]:
        """Keep the names of the newest version; return the others."""
        names = set[str]().union(*self.names.values())
        self.names = {number: self.names[number] for number in (self.newest(),)}
        return names

    def check_removed(self, by_compaction: bool) -> None:
        """Check that nothing is left that was replaced long ago, or before a compaction."""
        named, leased = set[str](), set[str]()
        if self.reader is not None and self.lease is not None:
            named = self.reader[3]
            leased = {s.directory.name for s in self.reader[0].opened.segments}
        replaced = set[str]().union(*self.names.values())
        if by_compaction:
            self.forget_replaced()
            self.perhaps_left = set()
        named = named.union(self.perhaps_left, *(self.names[number] for number in self.kept()))
        left = {
            place: days
            for place, days in places_in(self.path).items()
            # a lease names segments, so it keeps all parts of their indexes
            if place not in named and segment_of_part(place.partition("/")[2]) not in leased
        }
        assert replaced.isdisjoint(left)
        assert [place for place, days in left.items() if days >= MIN_AGE.days] == []


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(1), marks=pytest.mark.slow, id="once"),
        pytest.param(range(1, 11), marks=pytest.mark.nightly, id="ten times"),
    ],
)
def test_dataset_is_that_of_its_model(seeds: range, tmp_path: Path) -> None:
    job, dataset = write_files(tmp_path), tmp_path / "dataset"
    for first, append in zip((request, addition), FIRST, strict=True):
        build(first(job, tmp_path / append.log, dataset, day=append.day))
    for number in seeds:
        machine: Any = seed(number)(partial(DatasetMachine, tmp_path))
        few = settings(max_examples=10, stateful_step_count=20)  # with more they hardly differ
        run_state_machine_as_test(machine, settings=few)
