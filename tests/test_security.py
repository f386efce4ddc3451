"""What docs/security.md says of the code: found in its syntax trees, and in processes that run."""

from __future__ import annotations

import ast
import os
import re
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import apache_beam as beam
import duckdb
import pytest

import presage.pipelines.__main__
import presage.scheduler.__main__
import presage.trainer.__main__
from presage.pipelines.beam.runner import run_pipeline
from presage.pipelines.samples.sql import Connection
from presage.scheduler.drivers.job_files import copy_job_file, prepare_stores
from presage.schemas.storage.location import Location
from presage.trainer.stores.remote.wire import write_token
from tests.cluster.sockets import sockets_of
from tests.conftest import REPOSITORY
from tests.documents import blocks, commands
from tests.scheduler.small_job import paths_of
from tests.trainer.faults import Faults
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.processes import children_of, num_steps, run_until, start_training, wait_for_end
from tests.trainer.runs import SEGMENTS
from tests.trainer.stores import running, start_store

PACKAGES = ("schemas", "pipelines", "trainer", "scheduler", "presage")
LOOPBACK = {"127.0.0.1", "::1", "00000000000000000000000001000000"}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "os.system", "os.popen", "torch.load", "yaml.load"}
SERVERS = re.compile(
    r"(?:FlightServerBase|HTTPServer|create_server|LighthouseServer|TCPStore|create_device"
    r"|add_insecure_port|add_secure_port|grpc\.server|\.bind)$"
)
SERVER_FILES = {
    "presage/doctor.py",  # asks whether a port of loopback is free
    "scheduler/status/board.py",
    "trainer/elastic/sums.py",
    "trainer/elastic/membership.py",
    "trainer/elastic/peer_state.py",
    "trainer/stores/remote/server.py",
    "trainer/stores/remote/wire.py",  # whether a server can run at an address
}


@cache
def trees() -> list[tuple[str, ast.Module]]:
    """Return the path and the syntax tree of each source file of the packages."""
    return [
        (path.relative_to(REPOSITORY).as_posix(), ast.parse(path.read_text()))
        for package in PACKAGES
        for path in sorted((REPOSITORY / package).rglob("*.py"))
    ]


def imported(tree: ast.Module) -> set[str]:
    """Return the top-level modules that a file imports, also within functions."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Give each call and the text of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def keyword(call: ast.Call, name: str) -> object:
    """Return the constant that a call gives by a keyword, None where it gives none."""
    given = [k.value for k in call.keywords if k.arg == name]
    return given[0].value if given and isinstance(given[0], ast.Constant) else None


@pytest.mark.slow
def test_pickle_is_imported_by_two_modules_of_the_build_alone() -> None:
    found = {path for path, tree in trees() if imported(tree) & UNSAFE_MODULES}
    assert found == {"pipelines/beam/runner.py", "pipelines/beam/build_parts.py"}


@pytest.mark.slow
def test_nothing_that_runs_data_as_code_is_called() -> None:
    found = [
        f"{path}:{call.lineno}: {name}"
        for path, tree in trees()
        for name, call in calls(tree)
        if (name in UNSAFE_CALLS and keyword(call, "weights_only") is not True)
        or keyword(call, "shell") is not None
    ]
    assert found == []


def test_calls_and_imports_find_what_they_look_for() -> None:
    code = "def f():\n    from pickle import loads\n    run('x', shell=True)\n    torch.load('x')\n"
    tree = ast.parse(code)
    assert imported(tree) == {"pickle"}
    assert {name for name, _ in calls(tree)} == {"run", "torch.load"}
    assert [keyword(call, "shell") for _, call in calls(tree)] == [True, None]


@pytest.mark.slow
def test_arrays_are_read_without_pickle() -> None:
    reads = [
        keyword(call, "allow_pickle")
        for _, tree in trees()
        for name, call in calls(tree)
        if name in ("np.load", "numpy.load")
    ]
    assert set(reads) == {False}


@pytest.mark.slow
def test_servers_are_made_in_known_files_only() -> None:
    found = set[str]()
    for path, tree in trees():
        bases = [
            ast.unparse(base)
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for base in node.bases
        ]
        if any(SERVERS.search(name) for name in (*bases, *(name for name, _ in calls(tree)))):
            found.add(path)
    assert found == SERVER_FILES


def options_of(parser: ArgumentParser) -> Iterator[tuple[str, object]]:
    """Give each option of a parser and of its commands, with its default."""
    for action in parser._actions:
        for option in action.option_strings:
            yield option, action.default
        if isinstance(action.choices, dict):
            for command in action.choices.values():
                yield from options_of(command)


def all_options() -> list[tuple[str, object]]:
    mains = (presage.pipelines.__main__, presage.scheduler.__main__, presage.trainer.__main__)
    return [option for main in mains for option in options_of(main.build_parser())]


@pytest.mark.slow
def test_hosts_are_loopback_unless_said() -> None:
    hosts = [default for option, default in all_options() if option == "--host"]
    assert len(hosts) >= 3
    assert set(hosts) == {"127.0.0.1"}
    fields = {
        (path, ast.unparse(node.value))
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "host" and node.value
    }
    assert fields
    assert {default for _, default in fields} == {"'127.0.0.1'"}


def test_no_option_takes_a_secret_itself() -> None:
    words = ("token", "password", "secret", "credential")
    found = {option for option, _ in all_options() if any(word in option for word in words)}
    assert found == {"--token-file"}


def test_tokens_are_written_for_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        secret = write_token(tmp_path / "token")
        paths = paths_of(tmp_path / "demo", REPOSITORY / "schemas" / "demo" / "job.yaml")
        copy_job_file(paths, paths.source.read_bytes().decode())
        prepare_stores(paths, (0, 1))
    finally:
        os.umask(before)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert paths.token.stat().st_mode & 0o777 == 0o600
    assert len({secret, paths.token.read_text(), write_token(tmp_path / "token")}) == 3


def test_sql_of_a_job_reads_no_file(tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("a\n1\n")
    connection = Connection()
    with pytest.raises(duckdb.Error, match="disabled by configuration"):
        connection.query(f"SELECT * FROM read_csv('{tmp_path / 'secret.csv'}')")
    with pytest.raises(duckdb.Error, match="locked"):
        connection.query("SET enable_external_access = true")


def test_installs_ask_for_hashes() -> None:
    lines = (REPOSITORY / "Makefile").read_text().splitlines()
    installs = [line for line in lines if re.search(r"\bpip (?:install|sync)\b", line)]
    assert len(installs) == 2
    assert all("--require-hashes" in line for line in installs)
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    shown = [
        command
        for page in pages
        for block in blocks(page.read_text())
        if block.language == "console"
        for command, _ in commands(block.body)
    ]
    unhashed = [c for c in shown if "pip install" in c and "--require-hashes" not in c]
    assert set(unhashed) == {"python -m pip install --no-deps ."}


def listening() -> list[str]:
    """Return the hosts at which this process listens, told from within a worker of Beam."""
    return sorted({host for host, _ in sockets_of([os.getpid()]).listening})


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "hosts"), [(1, []), (2, ["::"])])
def test_beam_listens_on_all_interfaces_with_several_workers_and_nowhere_with_one(
    workers: int, hosts: list[str], tmp_path: Path
) -> None:
    before = sockets_of([os.getpid()]).listening

    def make(pipeline: beam.Pipeline) -> dict[str, Any]:
        asked = pipeline | beam.Create([0])
        return {"hosts": asked | beam.Map(lambda _: listening())}

    (tmp_path / "results").mkdir()
    arguments = [f"--direct_num_workers={workers}", "--direct_running_mode=multi_threading"]
    options = arguments[: 2 if workers > 1 else 1]
    outputs = run_pipeline(make, options, Location.parse(tmp_path))
    assert outputs["hosts"] == [sorted({*hosts, *(host for host, _ in before)})]


def family_of(pid: int) -> dict[int, list[str]]:
    """Return the processes below one, with their command lines."""
    found = children_of(pid)
    for child in list(found):
        found |= family_of(child)
    return found


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def test_store_tells_its_token_to_nobody_and_listens_on_loopback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = write_token(tmp_path / "made")
    with running(start_store(tmp_path / "store", token=secret)) as (store,):
        pid = store.process.pid
        assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert secret.encode() not in environment_of(pid)
        hosts = {host for host, _ in sockets_of([pid]).listening}
        assert hosts
        assert hosts <= LOOPBACK
        store.process.terminate()
        assert store.process.stdout is not None
        output = store.process.stdout.read() + "".join(capfd.readouterr())
    assert secret not in output
    assert files_with(secret, tmp_path / "store") == []


def files_with(text: str, folder: Path) -> list[str]:
    """Return the files below a folder that hold a text."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and text.encode() in path.read_bytes()
    )


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_run_with_stores_and_replicas_leaves_tokens_in_their_files_alone(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", lookahead="2", every_steps="12")
    dataset = make_dataset(tmp_path / "dataset", job, SEGMENTS)
    run, slowly = tmp_path / "run", Faults().pause(0, 0.1).pause(1, 0.1)
    more = ("--embedding", "cached", "--stores", "1")
    process = start_training(job, dataset, run, "--replicas", "2", *more, faults=slowly)
    run_until(process, lambda: num_steps(run) >= 3)
    secrets = {path: (run / path).read_text().strip() for path in ("token", "store/token")}
    family = family_of(process.pid)
    assert len(family) >= 3
    texts = [" ".join(command).encode() + environment_of(pid) for pid, command in family.items()]
    hosts = {host for host, _ in sockets_of([process.pid, *family]).listening}
    status, stderr = wait_for_end(process)
    assert status == 0, stderr
    assert hosts
    assert hosts <= LOOPBACK
    for path, secret in secrets.items():
        assert (run / path).stat().st_mode & 0o777 == 0o600
        assert not any(secret.encode() in text for text in texts)
        assert secret not in stderr
        assert files_with(secret, run) == [path]
