"""A fork server for the tests' child processes, which spares them the imports of Torch and Beam.

`patch_popen` replaces `subprocess.Popen`, in the tests and in their children: commands of this
repository, and Beam's workers, are forked from one single-threaded process per test session that
has imported everything. A forked process has the arguments, open files, working directory and
environment of an ordinary child; its parent is the server (see `forked_children`).
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import random
import re
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

ADDRESS = "PRESAGE_TEST_FORK_SERVER"
"""Environment variable with the directory of the server's socket; unset: nothing is forked."""
MODULES = ("presage", "presage.pipelines", "presage.scheduler", "presage.trainer")
"""Packages with a command line; modules of `tests` are forked as well."""
SHORT = ("pipelines", "scheduler", "trainer")
"""The same from a checkout."""
FORKS_STAGES = "PRESAGE_TEST_FORK_STAGES"
"""Environment variable: what the scheduler starts by its shell is forked, too. It then reads more
memory of these processes than they need, since all modules are imported."""
SHELL = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"']
"""How the scheduler starts a process: the first argument is the file of its id."""
BEAM_WORKER = "apache_beam.runners.worker.sdk_worker_main"
_Popen = subprocess.Popen
PRELOADED = (
    "apache_beam.runners.portability.fn_api_runner",
    BEAM_WORKER,
    "duckdb",
    "pandas",
    "presage.pipelines.build",
    "presage.dataset",
    *(f"{module}.__main__" for module in MODULES),
    "presage.trainer.elastic.launcher",
    "presage.trainer.elastic.worker",
    "presage.trainer.stores.remote.processes",
    "presage.trainer.train",
)
WITHOUT_THREADS = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # CUDA starts threads, and works in no forked process
}
"""Keeps the imports from starting threads: `fork` copies only the calling thread, and a lock that
another thread holds stays locked in the child."""
_REPOSITORY = Path(__file__).resolve().parents[1]
_MAX_FILES = 64
_LINE_BYTES = 16_384
"""Room for the command line that `/proc` shows of a forked process."""


def patch_popen() -> None:
    """Replace `subprocess.Popen` and `os.waitid` in this process."""
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    os.waitid = _waitid


def start_session() -> None:
    """Choose the server's directory, for this process and its children, and patch `Popen`."""
    if ADDRESS not in os.environ:
        folder = tempfile.mkdtemp(prefix="presage-fork-server-")
        Path(folder, "owner").write_text(str(os.getpid()))
        os.environ[ADDRESS] = folder
    patch_popen()


def end_session() -> None:
    """Remove the server's directory if this process made it; the server ends with this process."""
    folder = Path(os.environ.get(ADDRESS, "/nonexistent"))
    if (folder / "owner").exists() and int((folder / "owner").read_text()) == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)  # children that end remove their files, too


@contextmanager
def without_forking() -> Iterator[None]:
    """Start children, and theirs, as fresh interpreters."""
    folder = os.environ.pop(ADDRESS, None)
    try:
        yield
    finally:
        if folder is not None:
            os.environ[ADDRESS] = folder


class ForkedPopen(_Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` that forks from the server where it can."""

    _server: socket.socket | None = None

    def _execute_child(self, args: Any, *rest: Any) -> None:
        """Start the process; the signature is that of Python 3.11."""
        executable, preexec, _, pass_fds, cwd, env, _, _, _, *pipes = rest[:15]
        own_session, group = rest[-2:]
        environment = os.environ if env is None else env
        is_plain = not (executable or preexec or group != -1)
        words, pid_file = _words_of(args), None
        if words[:3] == SHELL and FORKS_STAGES in environment:
            pid_file, words = words[3], words[4:]
        if not is_plain or not is_forkable(words, environment):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        standard = (pipes[0], pipes[3], pipes[5])
        files = {n: n if fd == -1 else fd for n, fd in enumerate(standard)}
        request = {
            "arguments": words[1:],
            "environment": dict(environment),
            "folder": str(Path.cwd() / os.fsdecode(cwd or ".")),
            "own_session": own_session,
            "parent": os.getpid(),
            "pid_file": pid_file,
        }
        self._server, self.pid = request_fork(request, files | {n: n for n in pass_fds})
        _forked[self.pid] = self
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        if self._server is None:
            return super()._internal_poll(_deadstate)  # type: ignore[misc]
        if self.returncode is None:
            pid, status = self._wait_status(self.pid, os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._server is None:
            return super()._try_wait(flags)  # type: ignore[misc]
        return self._wait_status(self.pid, flags)

    def _wait_status(self, pid: int, flags: int) -> tuple[int, int]:
        """Return what `os.waitpid` returns of a child."""
        assert self._server is not None
        with suppress(BlockingIOError):
            status = self._server.recv(4, socket.MSG_DONTWAIT if flags & os.WNOHANG else 0)
            self._server.close()
            return pid, struct.unpack("i", status)[0] if status else signal.SIGKILL
        return 0, 0


_forked: WeakValueDictionary[int, ForkedPopen] = WeakValueDictionary()
_wait_for_id = os.waitid


def _waitid(kind: int, number: int, options: int) -> object | None:
    """Return what `os.waitid` returns; of a forked process only whether it has ended."""
    process = _forked.get(number)
    server = None if process is None or kind != os.P_PID else process._server
    if server is None:
        return _wait_for_id(kind, number, options)
    with suppress(BlockingIOError):
        server.recv(4, socket.MSG_PEEK | (socket.MSG_DONTWAIT if options & os.WNOHANG else 0))
        return process
    return None


def _words_of(args: Any) -> list[str]:
    """Return the words of a command; none of text for a shell, but for Beam's workers."""
    if isinstance(args, (str, bytes, os.PathLike)):
        text = os.fsdecode(args)
        return shlex.split(text) if BEAM_WORKER in text else []
    return [os.fsdecode(word) for word in args]


def is_forkable(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a command is Python and a program that imports Torch or Beam."""
    if len(words) < 3 or words[0] != sys.executable or ADDRESS not in environment:
        return False
    option, program = words[1:3]
    if option == "-m":
        return program in (*MODULES, *SHORT, BEAM_WORKER) or program.startswith("tests.")
    if option == "-c":
        return "import" in program and "apache_beam" in program
    return "deploy/flink" in option


def request_fork(request: dict[str, Any], files: Mapping[int, int]) -> tuple[socket.socket, int]:
    """Fork a process from the server.

    Args:
        request: arguments, environment, folder, own_session and parent.
        files: file descriptor in the new process -> file descriptor here.

    Returns:
        The connection that receives the exit status, and the process id.
    """
    folder = Path(request["environment"][ADDRESS])
    connection = _connect(folder)
    body = json.dumps(request | {"files": list(files)}).encode()
    header = struct.pack("i", len(body))
    socket.send_fds(connection, [header], list(files.values()))
    connection.sendall(body)
    return connection, struct.unpack("i", _receive(connection, 4))[0]


def _connect(folder: Path) -> socket.socket:
    address = str(folder / "socket")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "socket").exists():
            with (folder / "log").open("wb") as log:
                server = _Popen(
                    [sys.executable, "-m", "tests.fork_server", str(folder), " " * _LINE_BYTES],
                    cwd=_REPOSITORY,
                    env=os.environ | WITHOUT_THREADS | {"RUST_LOG": "warn"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            while not (folder / "socket").exists():
                assert server.poll() is None, (folder / "log").read_text()
                time.sleep(0.01)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return connection


def _receive(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = connection.recv(size - len(found))
        if not more:
            raise ConnectionError("the fork server has ended")
        found += more
    return found


def forked_children(pid: int) -> list[int]:
    """Return the ids of the running processes that were forked for a process."""
    folder = Path(os.environ.get(ADDRESS, "/nonexistent"))
    children = []
    for file in folder.glob("*.parent"):
        with suppress(FileNotFoundError):  # of a process that ends meanwhile
            if file.read_text() == str(pid):
                children.append(int(file.stem))
    return children


class _Server:
    """Forks processes until its owner ends."""

    def __init__(self, folder: Path) -> None:
        for module in PRELOADED:
            importlib.import_module(module)
        for module in (*(f"{name}.__main__" for name in MODULES), BEAM_WORKER):
            del sys.modules[module]  # is run by each process
        tasks = len(list(Path("/proc/self/task").iterdir()))
        assert tasks == 1, f"a process that forks must have no threads, got {tasks}"
        gc.collect()
        gc.freeze()  # a collection in a forked process would copy what it looks at
        self.folder = folder
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX)
        path = folder / "socket"
        self.listener.bind(f"{path}.new")
        self.listener.listen(128)
        self.owner = os.pidfd_open(int((folder / "owner").read_text()))
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(self.owner, selectors.EVENT_READ)
        Path(f"{path}.new").rename(path)

    def serve(self) -> Sequence[str]:
        """Fork until the owner ends, then exit; return the arguments in each forked process."""
        children: dict[int, tuple[int, socket.socket]] = {}
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    connection, _ = self.listener.accept()
                    header, files, _, _ = socket.recv_fds(connection, 4, _MAX_FILES)
                    with suppress(OSError, struct.error):  # the starter may be killed meanwhile
                        request = json.loads(_receive(connection, struct.unpack("i", header)[0]))
                        pid = os.fork()
                        if pid == 0:
                            return self._enter_child(request, files, connection, children)
                        (self.folder / f"{pid}.parent").write_text(str(request["parent"]))
                        ends = os.pidfd_open(pid)
                        children[ends] = pid, connection
                        self.selector.register(ends, selectors.EVENT_READ)
                        connection.sendall(struct.pack("i", pid))
                    for file in files:
                        os.close(file)
                elif key.fd == self.owner:
                    os._exit(0)
                else:
                    self.selector.unregister(key.fd)
                    os.close(key.fd)
                    pid, connection = children.pop(key.fd)
                    _, status = os.waitpid(pid, 0)
                    (self.folder / f"{pid}.parent").unlink()
                    with connection, suppress(OSError):  # the starter may have ended
                        connection.sendall(struct.pack("i", status))

    def _enter_child(
        self,
        request: dict[str, Any],
        files: list[int],
        connection: socket.socket,
        others: Mapping[int, tuple[int, socket.socket]],
    ) -> Sequence[str]:
        """Set up the process of a request; return its arguments."""
        for ends, (_, other) in others.items():
            os.close(ends)
            other.close()
        self.selector.close()
        self.listener.close()
        os.close(self.owner)
        connection.close()
        above = max(256, *request["files"]) + 1  # no number that a file gets below is in use
        moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]
        for file in files:
            os.close(file)
        for number, file in zip(request["files"], moved, strict=True):
            os.dup2(file, number)
            os.close(file)
        parent = request["parent"]
        if request["own_session"]:
            os.setsid()
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        if request.get("pid_file"):
            Path(request["pid_file"]).write_text(f"{os.getpid()}\n")
        os.getppid = lambda: parent if Path(f"/proc/{parent}").exists() else 1
        _set_command_line(["python", *request["arguments"]])
        random.seed()
        return request["arguments"]


def _set_command_line(words: Sequence[str]) -> None:
    """Set the command line that `/proc` shows."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = "\0".join(words).encode() + b"\0"
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(line[: end - start].ljust(end - start, b"\0"))


def _run(arguments: Sequence[str]) -> int:
    """Do what an interpreter does with these arguments; return the exit status."""
    first, *rest = arguments
    sys.path[0] = str(Path(first).resolve().parent if first.endswith(".py") else Path.cwd())
    extra = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[1:1] = [path for path in extra if path not in sys.path]
    sys.argv = rest if first == "-m" else [first, *rest]
    try:
        if first == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-":
            sys.modules["__main__"] = script = types.ModuleType("__main__")
            exec(compile(sys.stdin.read(), "<stdin>", "exec"), script.__dict__)
        elif first == "-c":
            sys.modules["__main__"] = script = types.ModuleType("__main__")
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), script.__dict__)
        else:
            runpy.run_path(first, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # as an interpreter does
        traceback.print_exc()
        return 1
    return 0


def write_python_wrapper(path: Path) -> None:
    """Write an executable that stands for `python` and forks from the server.

    It forwards SIGINT and SIGTERM and exits with the status of the process.
    """
    program = f"import sys; sys.path[0] = {str(_REPOSITORY)!r}; from tests import fork_server; "
    path.write_text(f"#!{sys.executable} -S\n{program}fork_server.run_wrapper()\n")
    path.chmod(0o755)


def run_wrapper() -> None:
    """Fork the process of the command line, or start an interpreter where that is not possible."""
    words = sys.argv[1:]
    if ADDRESS not in os.environ or not re.fullmatch(r"-|-m|[^-].*\.py", "".join(words[:1])):
        os.execv(sys.executable, [sys.executable, *words])
    request = {
        "arguments": words,
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "own_session": False,
        "parent": os.getpid(),
    }
    connection, pid = request_fork(request, {0: 0, 1: 1, 2: 2})
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda sent, _: os.kill(pid, sent))
    status = os.waitstatus_to_exitcode(struct.unpack("i", _receive(connection, 4))[0])
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def main() -> None:
    """Serve; in a forked process, run its module."""
    arguments = _Server(Path(sys.argv[1])).serve()
    patch_popen()
    status = _run(arguments)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # to take the modules of the server apart would take two seconds


if __name__ == "__main__":
    main()
