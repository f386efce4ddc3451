"""`presage doctor`: report what a machine lacks before anything is started on it, with each fix.

The checks are one table (`CHECKS`). Packages are compared by their metadata and never imported, so
that a broken one is reported. A probe uses the real thing (it binds the port, writes a file, runs
`java -version`, lists Pods) and leaves nothing behind. Optional parts are `absent`, with what they
are needed for; `--need` and `--cluster` make them `lacks`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from presage import ROOT
from presage.scheduler.controller.log import LOG
from presage.scheduler.drivers.kubernetes.pod_manifest import read_cluster
from presage.schemas.errors import PlanError, SchemaError
from presage.schemas.machine import free_bytes
from presage.schemas.run.records import read_lines
from presage.schemas.typed_values import parse_size

SOURCES = ROOT
"""The source tree, or where the packages are installed."""
LOCK = SOURCES / "requirements.lock"
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
"""Versions that the packages have wheels for (`docs/install.md`)."""
OLDEST_JAVA, NEWEST_JAVA = 11, 17
"""Versions of Java that Flink 1.19 supports."""
MAX_SKEW_SEC = 2.0
"""Tolerated difference between this machine's clock and a filesystem's."""
MAX_PACKAGES = 5
"""Packages that a finding lists."""
TIMEOUT_SEC = 20.0
"""Time limit of a program that is run."""
FLINK = "builds on Flink (docs/flink.md)"
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is checked."""

    environment: Mapping[str, str]
    """Environment variables; PATH, HOME and XDG_CACHE_HOME are read."""
    sites: tuple[str, ...]
    """Directories of packages; the first match wins."""
    python: tuple[int, int]
    output: Path
    now_sec: float
    lock: Path = LOCK
    flink: Path = SOURCES / "deploy" / "flink"
    shared_memory: Path = Path("/dev/shm")
    least_shared_bytes: int = 1 << 30
    least_disk_bytes: int = 5 << 30
    port: int = 0
    """Port of the status page; 0 for any."""
    cluster: Path | None = None
    needed: frozenset[str] = field(default_factory=frozenset[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of a check."""

    name: str
    ok: bool
    must: str
    found: str
    fix: str
    needed_for: str = ""
    needed: bool = True
    """Whether its absence is a failure."""

    @property
    def state(self) -> str:
        """`ok`, `lacks`, or `absent` if it is optional."""
        if self.ok:
            return "ok"
        return "lacks" if self.needed else "absent"


Probe = Callable[[Machine], tuple[bool, str]]
"""Returns whether the requirement is met, and what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A requirement of the machine: how to probe it, and how to meet it."""

    name: str
    probe: Probe
    must: Callable[[Machine], str]
    fix: str
    needed_for: str = ""
    """What works only with it; empty if nothing works without."""
    part: str = ""
    """Optional part to which it belongs."""

    def run(self, machine: Machine) -> CheckResult:
        """Run the probe."""
        ok, found = self.probe(machine)
        return CheckResult(
            name=self.name,
            ok=ok,
            must=self.must(machine),
            found=found,
            fix=self.fix,
            needed_for=self.needed_for,
            needed=not self.part or self.part in machine.needed,
        )


def examine(machine: Machine) -> list[CheckResult]:
    """Run all checks."""
    return [check.run(machine) for check in CHECKS]


def format_finding(finding: CheckResult) -> str:
    """Return a finding as one line.

    Example:
        >>> format_finding(
        ...     CheckResult(name="disk", ok=False, must="have 5 GiB free", found="1 GiB", fix="go")
        ... )
        'lacks   disk: 1 GiB (must have 5 GiB free); go'
    """
    line = f"{finding.state:<7} {finding.name}: {finding.found}"
    if finding.ok:
        return line
    purpose = f", for {finding.needed_for}" if finding.needed_for else ""
    return f"{line} (must {finding.must}{purpose}); {finding.fix}"


def findings_to_json(findings: list[CheckResult]) -> dict[str, Any]:
    """Return `findings`, and `ok`: whether nothing that is needed is missing."""
    bodies = [{**asdict(finding), "state": finding.state} for finding in findings]
    return {"ok": not any(f.state == "lacks" for f in findings), "findings": bodies}


def _probe_python(machine: Machine) -> tuple[bool, str]:
    return OLDEST_PYTHON <= machine.python <= NEWEST_PYTHON, _version(machine.python)


def _versions_of(machine: Machine) -> str:
    is_installed = machine.lock == LOCK and not LOCK.exists()
    return "Presage's metadata" if is_installed else machine.lock.name


def _version(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _probe_packages(machine: Machine) -> tuple[bool, str]:
    try:
        pinned = parse_lock(machine.lock.read_text(encoding="utf-8"))
    except OSError as error:
        pinned = required_versions(machine.sites)
        if machine.lock != LOCK or not pinned:
            return False, f"no lock: {error.strerror}"
    problems = differences(pinned, installed_packages(machine.sites))
    if not problems:
        return True, f"all {len(pinned)}"
    listed = "; ".join(problems[:MAX_PACKAGES])
    num_more = len(problems) - MAX_PACKAGES
    return False, f"{listed}; {num_more} more" if num_more > 0 else listed


def parse_lock(text: str) -> dict[str, str]:
    r"""Return the packages of a lock and their versions, with normalized names.

    Example:
        >>> parse_lock("absl-py==2.5.1 \\\n    --hash=sha256:0\nPyYAML==6.0 ; python_version > '3'")
        {'absl-py': '2.5.1', 'pyyaml': '6.0'}
    """
    return {_normalize(name): version for name, version in _PINNED.findall(text)}


def required_versions(sites: Sequence[str]) -> dict[str, str]:
    """Return the versions that an installed Presage names, of extras only what is installed."""
    installed, required = installed_packages(sites), dict[str, str]()
    for distribution in distributions(path=list(sites), name="presage"):
        for line in distribution.requires or ():
            match, name = _PINNED.match(line), _normalize(re.split(r"[^\w.-]", line, maxsplit=1)[0])
            if match and ("extra ==" not in line or name in installed):
                required[name] = match[2].rstrip(";")
    return required


def installed_packages(sites: Sequence[str]) -> dict[str, str]:
    """Return the packages in some directories and their versions."""
    packages: dict[str, str] = {}
    for distribution in distributions(path=list(sites)):
        name: str | None = distribution.metadata["Name"]
        if name:
            packages.setdefault(_normalize(name), distribution.version)
    return packages


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def differences(pinned: Mapping[str, str], installed: Mapping[str, str]) -> list[str]:
    """Return missing packages and other versions, sorted by name.

    A local version (`+cpu`) is another build of the same version.

    Example:
        >>> differences({"a": "1.0", "b": "2.0", "c": "3"}, {"a": "1.0+cpu", "b": "2.1"})
        ['b 2.1 instead of 2.0', 'no c 3']
    """
    problems: list[str] = []
    for name in sorted(pinned):
        version = installed.get(name)
        if version is None:
            problems.append(f"no {name} {pinned[name]}")
        elif pinned[name] not in (version, version.partition("+")[0]):
            problems.append(f"{name} {version} instead of {pinned[name]}")
    return problems


def _probe_shared_memory(machine: Machine) -> tuple[bool, str]:
    try:
        free = free_bytes(machine.shared_memory)
    except OSError:
        return False, "no such folder"
    return free >= machine.least_shared_bytes, _gib(free)


def _probe_disk(machine: Machine) -> tuple[bool, str]:
    folder = nearest_folder(machine.output)
    free = free_bytes(folder)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"doctor")
            file.flush()
    except OSError as error:
        return False, f"{_gib(free)} that cannot be written: {error.strerror}"
    return free >= machine.least_disk_bytes, _gib(free)


def nearest_folder(folder: Path) -> Path:
    """Return a folder, or its nearest existing parent."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def _probe_port(machine: Machine) -> tuple[bool, str]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", machine.port))
            server.listen()
        except OSError as error:
            return False, (error.strerror or str(error)).lower()
    return True, "one"


def _probe_clock(machine: Machine) -> tuple[bool, str]:
    problems = list(_clock_problems(machine.output, machine.now_sec))
    return not problems, "; ".join(problems) or "both"


def _clock_problems(folder: Path, now: float) -> Iterator[str]:
    try:
        with tempfile.NamedTemporaryFile(dir=nearest_folder(folder)) as file:
            file.write(b"doctor")
            file.flush()
            skew = os.fstat(file.fileno()).st_mtime - now
    except OSError as error:
        yield f"no file to compare with: {error.strerror}"
        return
    if abs(skew) > MAX_SKEW_SEC:
        yield f"files {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
    last = last_time(folder / LOG)
    if last is not None and last - now > MAX_SKEW_SEC:
        yield f"{LOG} {last - now:.1f} s ahead"


def last_time(log: Path) -> float | None:
    """Return the time of the last event of a log in seconds since 1970; None without a log."""
    if not log.is_file():
        return None
    times = read_lines(log, _event_time, "an event")
    return max((time for time in times if time is not None), default=None)


def _event_time(body: dict[str, Any]) -> float | None:
    """Return the time of an event, or of the last one before a snapshot."""
    return body.get("time_sec", body.get("snapshot", {}).get("state", {}).get("now_sec"))


def _probe_java(machine: Machine) -> tuple[bool, str]:
    java = shutil.which("java", path=machine.environment.get("PATH", ""))
    if java is None:
        return False, "none on PATH"
    output = _run([java, "-version"], machine.environment)
    match = _JAVA_VERSION.search(output)
    if match is None:
        return False, _one_line(output or "no answer")
    return OLDEST_JAVA <= int(match[1]) <= NEWEST_JAVA, _one_line(output.splitlines()[0])


def _probe_flink(machine: Machine) -> tuple[bool, str]:
    home = machine.environment.get("XDG_CACHE_HOME") or str(
        Path(machine.environment.get("HOME", "")) / ".cache"
    )
    try:
        files = [machine.flink / name for name in ("pom.xml", "requirements.txt")]
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    except OSError as error:
        return False, f"{error.strerror}: {error.filename}"
    folder = Path(home) / "presage" / "flink" / digest[:12]
    if folder.is_dir():
        return True, "all"
    return False, f"no {folder.name} in {folder.parent}"


def _probe_gpu(machine: Machine) -> tuple[bool, str]:
    program = shutil.which("nvidia-smi", path=machine.environment.get("PATH", ""))
    output = _run([program, "-L"], machine.environment) if program else ""
    num_gpus = sum(line.startswith("GPU ") for line in output.splitlines())
    has_package = "fbgemm-gpu" in installed_packages(machine.sites)
    gpus = f"{num_gpus} GPUs" if num_gpus else "no GPU listed by nvidia-smi"
    return num_gpus > 0 and has_package, f"{gpus}, {'' if has_package else 'no '}fbgemm-gpu"


def _probe_kubernetes(machine: Machine) -> tuple[bool, str]:
    if machine.cluster is None:
        return False, "no --cluster file"
    # The client takes a second to import, and 40 MiB.
    from presage.scheduler.drivers.kubernetes.api_server import (
        ApiRefusedError,
        UnreachableError,
        connect,
    )

    try:
        api = connect(read_cluster(machine.cluster))
    except SchemaError as error:
        return False, _one_line(str(error))
    try:
        pods, _ = api.list("")
        return True, f"{len(pods)} Pods at {api.host}"
    except (ApiRefusedError, UnreachableError) as error:
        return False, _one_line(str(error))
    finally:
        api.close()


def _run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the output of a program on both streams, or the error if it cannot be run."""
    try:
        completed = subprocess.run(
            command,
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SEC,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (completed.stdout + completed.stderr).strip()


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


CHECKS = (
    Check(
        name="python",
        probe=_probe_python,
        must=lambda _: f"be {_version(OLDEST_PYTHON)} to {_version(NEWEST_PYTHON)}",
        fix="make an environment of one of these (docs/install.md)",
    ),
    Check(
        name="wheels",
        probe=_probe_packages,
        must=lambda m: f"have the versions of {_versions_of(m)}",
        fix="run make setup, or install Presage again (docs/install.md)",
    ),
    Check(
        name="shared memory",
        probe=_probe_shared_memory,
        must=lambda m: f"have {_gib(m.least_shared_bytes)} free in {m.shared_memory}",
        fix="mount a larger one (docker run --shm-size; in a Pod an emptyDir of medium Memory), "
        "or set train.checkpoint.copy_to to a folder on a disk",
    ),
    Check(
        name="disk",
        probe=_probe_disk,
        must=lambda m: (
            f"have {_gib(m.least_disk_bytes)} free in {nearest_folder(m.output)}, and be writable"
        ),
        fix="free some, make the folder writable for this user, or choose another --output",
    ),
    Check(
        name="ports",
        probe=_probe_port,
        must=lambda m: f"have {f'port {m.port}' if m.port else 'a port'} free on loopback",
        fix="stop the process that listens there (ss -ltnp), or choose another --port",
    ),
    Check(
        name="clock",
        probe=_probe_clock,
        must=lambda _: f"agree with files to {MAX_SKEW_SEC:g} s, and not be behind the log",
        fix="synchronize this machine and the file server (chronyc tracking, timedatectl)",
    ),
    Check(
        name="java",
        probe=_probe_java,
        must=lambda _: f"be of version {OLDEST_JAVA} to {NEWEST_JAVA}",
        fix="install a JDK of version 17, or put it first on PATH",
        needed_for=FLINK,
        part="flink",
    ),
    Check(
        name="flink jars",
        probe=_probe_flink,
        must=lambda _: "be in the cache, in the versions of pom.xml",
        fix="run python deploy/flink fetch in the source tree",
        needed_for=FLINK,
        part="flink",
    ),
    Check(
        name="gpu",
        probe=_probe_gpu,
        must=lambda _: "exist, with the packages of requirements-gpu.lock",
        fix="install NVIDIA's driver, then run uv pip sync requirements-gpu.lock",
        needed_for="train.device: cuda",
        part="gpu",
    ),
    Check(
        name="kubernetes",
        probe=_probe_kubernetes,
        must=lambda _: "let the scheduler list the Pods of its namespace",
        fix="name a --cluster file, and grant the rights of deploy/kubernetes/base/rbac.yaml",
        needed_for="schedule.driver: kubernetes",
        part="kubernetes",
    ),
)
PARTS = tuple(dict.fromkeys(check.part for check in CHECKS if check.part))
"""Optional parts."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help="folder of datasets and runs"
    )
    command.add_argument(
        "--lock", type=Path, metavar="FILE", help="required packages; default: requirements.lock"
    )
    command.add_argument(
        "--shared-memory",
        type=Path,
        metavar="DIR",
        help="train.checkpoint.copy_to if it is set; default: /dev/shm",
    )
    command.add_argument(
        "--least-shared",
        type=parse_size,
        default=1 << 30,
        metavar="SIZE",
        help="required free shared memory",
    )
    command.add_argument(
        "--least-disk",
        type=parse_size,
        default=5 << 30,
        metavar="SIZE",
        help="required free space in --output",
    )
    command.add_argument("--port", type=int, default=0, help="of the status page; default: any")
    command.add_argument("--cluster", type=Path, metavar="FILE", help="configuration of a cluster")
    command.add_argument("--url", help="URL or path of datasets and runs, to be checked as well")
    command.add_argument(
        "--need",
        action="append",
        default=[],
        choices=PARTS,
        help="optional part that is needed; may be repeated",
    )


def machine_of(
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    sites: Sequence[str],
    python: tuple[int, int],
    now_sec: float,
) -> Machine:
    """Return the machine to check, as the options describe it."""
    paths = {"lock": arguments.lock, "shared_memory": arguments.shared_memory}
    needed = frozenset(arguments.need)
    return Machine(
        environment=environment,
        sites=tuple(sites),
        python=python,
        output=arguments.output,
        now_sec=now_sec,
        least_shared_bytes=arguments.least_shared,
        least_disk_bytes=arguments.least_disk,
        port=arguments.port,
        cluster=arguments.cluster,
        needed=needed if arguments.cluster is None else needed | {"kubernetes"},
        **{name: path for name, path in paths.items() if path is not None},
    )


def run(arguments: argparse.Namespace) -> None:
    """Print the findings about this machine, and about the URL if one is given.

    Raises:
        PlanError: something that is needed is missing.
    """
    machine = machine_of(arguments, os.environ, sys.path, sys.version_info[:2], time.time())
    findings = examine(machine)
    if arguments.url is not None:
        findings += import_module("presage.doctor_url").examine_url(arguments.url)
    if arguments.json:
        sys.stdout.write(f"{json.dumps(findings_to_json(findings))}\n")
    else:
        sys.stdout.writelines(f"{format_finding(finding)}\n" for finding in findings)
    if missing := [finding.name for finding in findings if finding.state == "lacks"]:
        raise PlanError(f"machine lacks {', '.join(missing)}; see the findings")
