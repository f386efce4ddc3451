"""How commands end: with their status, without a traceback or an abort, and with nothing alive."""

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.schemas.entry import MIN_ADDRESS_BYTES
from tests.commands import COMMANDS, STATUS, command_line, inputs, left_alive, parsed_commands
from tests.fork_server import without_forking

ALL = [(package, command) for package, commands in COMMANDS.items() for command in commands]
SECONDS_LONG = {"export", "publish", "score"}
WITH_BEAM = {"score"}
"""The local runner of Beam leaves threads that wait for work, with the model that they use."""
BAD = re.compile("Traceback|Fatal Python error|terminate called|Exception ignored|core dumped")
FILE_BYTES = 4096
"""Most bytes of a file where writes are to fail."""
FAILED_WRITES = {"build", "rewrite", "train", "run"}
"""Commands whose writes fail in `make test`; those of the others fail in nightly tests."""
WAIT_SEC = 120


def run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def assert_ended(done: subprocess.CompletedProcess[str], statuses: set[int]) -> None:
    assert done.returncode in statuses, done.stderr
    assert not BAD.search(done.stderr), done.stderr


def test_each_command_of_the_parsers_is_run_here() -> None:
    found = {name: set(commands) for name, commands in COMMANDS.items() if name != "presage"}
    assert found == parsed_commands()


@pytest.mark.slow
def test_what_a_command_leaves_alive_is_found(tmp_path: Path) -> None:
    before = left_alive(())
    assert left_alive(before) == []
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name="lease", daemon=True)
    thread.start()
    connection, file = duckdb.connect(), pq.ParquetFile(tmp_path / "x.parquet")
    with (
        (tmp_path / "log").open("w"),
        ThreadPoolExecutor(1, "pool") as pool,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child,
    ):
        pool.submit(int).result()
        found = left_alive(before)
    ended.set()
    connection.close()
    file.close()
    for kind in (
        *("thread lease", "thread pool_0", "ThreadPoolExecutor", "DuckDBPyConnection"),
        *("ParquetFile", f"process {child.pid}", f"{tmp_path}/log"),
    ):
        assert any(kind in each for each in found), (kind, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "command", "file_bytes"),
    [
        *(pytest.param(*each, -1, id="-".join(each)) for each in ALL),
        *(
            pytest.param(
                *each,
                FILE_BYTES,
                id="-".join((*each, "failed writes")),
                marks=[] if each[1] in FAILED_WRITES else [pytest.mark.nightly],
            )
            for each in ALL
            if "{" in COMMANDS[each[0]][each[1]].replace("{in}", "") and each[1] not in WITH_BEAM
        ),
    ],
)
def test_command_leaves_nothing_alive(
    package: str, command: str, file_bytes: int, tmp_path: Path
) -> None:
    python, _, *words = command_line(package, command, tmp_path / "ends")
    done = run([python, "-m", "tests.commands", str(file_bytes), *words])
    expected = {STATUS.get(command, 0)}
    assert_ended(done, expected if file_bytes == -1 else {*expected, 1})
    left = json.loads(done.stderr.splitlines()[-1])
    assert left == [] or command in WITH_BEAM, left


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("package", "command"), [each for each in ALL if each[1] not in SECONDS_LONG]
)
def test_command_ends_well_each_time(package: str, command: str, tmp_path: Path) -> None:
    for _ in range(5):
        assert_ended(
            run(command_line(package, command, tmp_path / "ends")), {STATUS.get(command, 0)}
        )


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("package", "command"), ALL)
def test_process_of_a_command_ends_well_fifty_times(
    package: str, command: str, tmp_path: Path
) -> None:
    for _ in range(50):
        words = command_line(package, command, tmp_path / "ends")
        with without_forking():
            done = run(words)
        assert_ended(done, {STATUS.get(command, 0)})


LOADER = "presage.DataLoader(sys.argv[1], batch_samples=128)"
LIBRARY = {
    "Dataset": "rows = iter(presage.Dataset(sys.argv[1]).batches()); next(rows)",
    "DataLoader": f"batches = iter({LOADER}); next(batches)",
    "PlannedSlots": f"data = {LOADER}; presage.PlannedSlots("
    "data, cache_rows=100_000, directory=tempfile.mkdtemp()); next(iter(data))",
    "open_rows": f"data = {LOADER}; rows = presage.open_rows(data, 'memory'); next(iter(data))",
    "planner_constraints": f"data = {LOADER}; presage.planner_constraints({{}}, []); "
    "next(iter(data))",
}
"""Programs that end while they read."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "Dataset",
        pytest.param("DataLoader", marks=pytest.mark.nightly),  # the next one has both
        "PlannedSlots",
        "open_rows",
        "planner_constraints",
    ],
)
@pytest.mark.parametrize("times", [1, pytest.param(50, marks=pytest.mark.chaos)])
def test_program_that_uses_the_library_ends_well(name: str, times: int) -> None:
    program = f"import sys, tempfile, presage; {LIBRARY[name]}"
    words = [sys.executable, "-c", program, str(inputs() / "dataset")]
    for _ in range(times):
        with without_forking():
            assert_ended(run(words), {0})


def test_programs_use_all_names_of_the_library() -> None:
    import presage

    assert set(LIBRARY) == set(presage.__all__)


# Signals.


def start(words: Sequence[str]) -> subprocess.Popen[str]:
    with without_forking():
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def has_handler(pid: int, number: int) -> bool:
    """Return whether a process has a handler of a signal."""
    with suppress(FileNotFoundError, ProcessLookupError):
        status = Path(f"/proc/{pid}/status").read_text()
        found = re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)
        return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)
    return False


def wait_for_entry(process: subprocess.Popen[str]) -> None:
    """Wait until the interpreter's own handler of SIGINT is replaced."""
    for expected in (True, False):
        while has_handler(process.pid, signal.SIGINT) is not expected and process.poll() is None:
            time.sleep(0.0005)


def assert_interrupted(
    package: str, command: str, number: int, after_sec: float, folder: Path
) -> None:
    process = start(command_line(package, command, folder))
    wait_for_entry(process)
    time.sleep(after_sec)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)  # as a terminal does
    _, errors = process.communicate(timeout=WAIT_SEC)
    assert process.returncode in {-number, 128 + number, STATUS.get(command, 0)}, errors
    assert not BAD.search(errors), errors
    assert not session_of(process.pid), errors


def session_of(pid: int) -> list[str]:
    """Return the processes of a session that live 5 s later."""
    alive: list[str] = []
    for _ in range(50):
        alive = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(FileNotFoundError, ProcessLookupError):
                state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
                if int(session) == pid and state != "Z":
                    alive.append((path.parent / "cmdline").read_text().replace("\0", " "))
        if not alive:
            break
        time.sleep(0.1)
    return alive


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "after_sec"), [("preview", 0.0), ("rewrite", 0.2), ("build", 0.5), ("build", 1.2)]
)
def test_interrupted_command_ends_by_the_signal(
    command: str, after_sec: float, tmp_path: Path
) -> None:
    assert_interrupted("pipelines", command, signal.SIGINT, after_sec, tmp_path / "ends")


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("package", "command"), ALL)
def test_command_interrupted_at_any_moment_ends_by_the_signal(
    package: str, command: str, number: int, tmp_path: Path
) -> None:
    drawn = random.Random(f"{package} {command} {number}")
    before = time.monotonic()
    process = start(command_line(package, command, tmp_path / "ends"))
    process.communicate(timeout=600)
    whole_sec = time.monotonic() - before
    for _ in range(10):
        after_sec = drawn.choice([0.5, whole_sec]) * drawn.random()
        assert_interrupted(package, command, number, after_sec, tmp_path / "ends")


@pytest.mark.slow
def test_store_that_is_terminated_ends_well_while_its_parent_holds_its_input(
    tmp_path: Path,
) -> None:
    words = command_line("trainer", "store", tmp_path / "ends")
    with (
        without_forking(),
        subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdout is not None
        assert "address" in process.stdout.readline()
        process.terminate()
        assert process.wait(WAIT_SEC) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


# The entry of all commands.

ENTRY = """
import atexit, os, signal, sys, threading
from presage.schemas.entry import run_command

def load():
    {load}
    return command

def command():
    {command}

print("main")
run_command(load)
"""


def run_entry(load: str = "pass", command: str = "return 0", **options: Any) -> tuple[int, str]:
    """Return the exit status and stderr of a process whose command is given."""
    program = ENTRY.format(load=load, command=command)
    done = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, **options
    )
    return done.returncode, done.stderr


KILL = "os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(
    ("load", "command", "expected"),
    [
        ("pass", "return 3", (3, "")),
        ("pass", "sys.exit(2)", (2, "")),
        ("pass", "sys.exit('error: x')", (1, "error: x\n")),
        ("pass", "atexit.register(print, 'late', file=sys.stderr); return 0", (0, "late\n")),
        ("pass", "raise MemoryError", (1, "error: memory may not suffice: MemoryError; use a "
         "machine with more\n")),
        (KILL, "return 0", (-2, "")),
        ("pass", KILL, (-2, "")),
        ("pass", f"{KILL}; {KILL}", (-2, "")),
        (f"atexit.register(lambda: {KILL})", "return 0", (-2, "")),
        ("signal.signal(2, signal.SIG_IGN)", f"signal.signal(2, signal.SIG_IGN); {KILL}; return 0",
         (0, "")),
    ],
)  # fmt: skip
def test_process_ends_as_its_command_does(
    load: str, command: str, expected: tuple[int, str]
) -> None:
    assert run_entry(load, command, stdout=subprocess.DEVNULL) == expected


def test_interrupt_that_a_library_replaces_ends_the_process_by_the_signal() -> None:
    command = f"""
    try:
        {KILL}
    except KeyboardInterrupt:
        raise RuntimeError('Query interrupted')"""
    assert run_entry(command=command, stdout=subprocess.DEVNULL) == (-2, "")


def test_interrupt_closes_the_contexts_of_a_command() -> None:
    command = f"""
    try:
        {KILL}
    finally:
        print('closed', file=sys.stderr)"""
    assert run_entry(command=command, stdout=subprocess.DEVNULL) == (-2, "closed\n")


def test_interrupt_that_a_shell_ignores_is_ignored() -> None:
    ignored = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    options = {"stdout": subprocess.DEVNULL, "preexec_fn": ignored}
    assert run_entry(KILL, f"{KILL}; return 0", **options) == (0, "")


def test_thread_that_holds_a_lock_of_the_input_does_not_abort_the_end() -> None:
    command = """
    threading.Thread(target=sys.stdin.buffer.read, daemon=True).start()
    return 0"""
    reading, writing = os.pipe()
    try:
        assert run_entry(command=command, stdin=reading, stdout=subprocess.DEVNULL) == (0, "")
    finally:
        os.close(reading)
        os.close(writing)


def test_fault_of_the_program_has_a_traceback() -> None:
    status, errors = run_entry(command="raise KeyError('x')", stdout=subprocess.DEVNULL)
    assert status == 1
    assert errors.endswith("KeyError: 'x'\n")


def test_output_that_cannot_be_written_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        status, errors = run_entry(command="sys.stdout.write('x'); return 0", stdout=full)
    assert status == 1
    assert "No space left on device" in errors


def limited(num_bytes: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


@pytest.mark.parametrize(
    ("package", "num_mib"),
    [("pipelines", 80), ("trainer", 300), ("scheduler", 80), ("presage", 300)],
)
def test_little_address_space_is_one_line(package: str, num_mib: int) -> None:
    words = [sys.executable, "-m", package, "verify", "nothing"]
    done = subprocess.run(words, capture_output=True, text=True, preexec_fn=limited(num_mib << 20))
    assert (done.returncode, done.stderr) == (
        1,
        f"error: address space must have at least {MIN_ADDRESS_BYTES >> 20} MiB, got {num_mib} "
        "(ulimit -v); raise the limit\n",
    )


@pytest.mark.slow
def test_module_that_cannot_be_loaded_in_the_address_space_is_one_line(tmp_path: Path) -> None:
    words = command_line("trainer", "evaluate", tmp_path / "ends")
    done = subprocess.run(words, capture_output=True, text=True, preexec_fn=limited(2 << 30))
    line = r"error: memory may not suffice: ImportError: .*; address space is limited to 2048 MiB "
    assert done.returncode == 1
    assert re.fullmatch(line + r"\(ulimit -v\), raise the limit\n", done.stderr), done.stderr
