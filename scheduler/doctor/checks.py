"""The checks of `scheduler doctor`."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from scheduler.drivers.kubernetes.api import RefusedError, UnreachableError, connect
from scheduler.drivers.kubernetes.manifest import read_cluster
from schemas.errors import PlanError, SchemaError
from schemas.run_log import read_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found."""

    name: str
    """What was looked at, a few words."""
    ok: bool
    """Whether it is as it must be."""
    must: str
    """The rule."""
    found: str
    """What there is instead, or what fulfils the rule."""
    fix: str
    """What to do where it is not fulfilled."""
    needed_for: str = ""
    """What works only with it; empty where nothing works without."""
    needed: bool = True
    """Whether its lack is a failure."""

    @property
    def state(self) -> str:
        """Return `ok`, `lacks` or, where it may lack, `absent`."""
        if self.ok:
            return "ok"
        return "lacks" if self.needed else "absent"


def line_of(finding: Finding) -> str:
    """Return a finding as one line.

    Example:
        >>> line_of(Finding(name="disk", ok=False, must="have 5 GiB free", found="1 GiB", fix="go"))
        'lacks   disk must have 5 GiB free, got 1 GiB; go'
    """
    line = f"{finding.state:<7} {finding.name} must {finding.must}, got {finding.found}"
    if finding.ok:
        return line
    whom = f" (needed for {finding.needed_for})" if finding.needed_for else ""
    return f"{line}{whom}; {finding.fix}"


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """Return all findings as one object: `ok`, whether nothing needed lacks, and `findings`."""
    shown = [{**asdict(finding), "state": finding.state} for finding in findings]
    return {"ok": not any(f.state == "lacks" for f in findings), "findings": shown}


def one_line(text: str) -> str:
    """Return a text as one line, cut at 200 characters.

    Example:
        >>> one_line("a" + chr(10) + "  b")
        'a b'
    """
    return " ".join(text.split())[:200]


LOG = "scheduler.jsonl"
"""Of a scheduler, in its folder."""
COMPILERS = ("g++", "c++", "clang++")
"""Names under which the trainer looks for a compiler of C++."""
MOST_SKEW_SEC = 2.0
"""Between this machine's clock and that of a filesystem."""
_GIB = 1 << 30


def shared_memory_finding(folder: Path, least_bytes: int) -> Finding:
    """See whether copies of checkpoints have room in memory.

    Args:
        folder: where shared memory is mounted.
        least_bytes: that must be free.
    """
    free = _free(folder)
    return Finding(
        name="shared memory",
        ok=free is not None and free >= least_bytes,
        must=f"have {_size(least_bytes)} free in {folder}",
        found="no such folder" if free is None else _size(free),
        fix="mount a larger one (docker run --shm-size; in a Pod an emptyDir of medium Memory), "
        "or set train.checkpoint.copy_to to a folder of a disk",
    )


def disk_finding(folder: Path, least_bytes: int) -> Finding:
    """See whether the folder of datasets and runs has room, and may be written.

    Args:
        folder: maybe not there yet; then the nearest one above it is looked at.
        least_bytes: that must be free.
    """
    place = nearest_folder(folder)
    free = _free(place) or 0
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"doctor")
            file.flush()
            trouble = ""
    except OSError as error:
        trouble = f" that cannot be written: {error.strerror}"
    return Finding(
        name="disk",
        ok=free >= least_bytes and not trouble,
        must=f"have {_size(least_bytes)} free in {place}, and be writable",
        found=f"{_size(free)}{trouble}",
        fix="free some, give the folder to this user, or choose another --output",
    )


def port_finding(port: int) -> Finding:
    """See whether a port of the loopback interface is free.

    Args:
        port: 0 for any.
    """
    trouble = ""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
            server.listen()
        except OSError as error:
            trouble = error.strerror or str(error)
    return Finding(
        name="ports",
        ok=not trouble,
        must=f"have {f'port {port}' if port else 'a port'} free on loopback",
        found=trouble.lower() or "one",
        fix="end the process that listens there (ss -ltnp), or name another --port",
    )


def clock_finding(folder: Path, now: float) -> Finding:
    """See whether the clock agrees with that of the folder's filesystem and with its log.

    Args:
        folder: of a scheduler, maybe not there yet.
        now: seconds since 1970.
    """
    problems = list(_clock_problems(folder, now))
    return Finding(
        name="clock",
        ok=not problems,
        must=f"agree with files to {MOST_SKEW_SEC:g} s, and not be behind the log",
        found="; ".join(problems) or "both",
        fix="synchronize this machine and the file server (chronyc tracking, timedatectl)",
    )


def _clock_problems(folder: Path, now: float) -> Iterator[str]:
    try:
        with tempfile.NamedTemporaryFile(dir=nearest_folder(folder)) as file:
            file.write(b"doctor")
            file.flush()
            skew = os.fstat(file.fileno()).st_mtime - now
    except OSError as error:
        yield f"no file to compare with: {error.strerror}"
        return
    if abs(skew) > MOST_SKEW_SEC:
        yield f"files {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
    last = last_time(folder / LOG)
    if last is not None and last - now > MOST_SKEW_SEC:
        yield f"{LOG} {last - now:.1f} s ahead"


def last_time(log: Path) -> float | None:
    """Return the time of the last event of a log, seconds since 1970; None without a log."""
    if not log.is_file():
        return None
    times = read_lines(log, _time_of, lambda line, _: f"line must be an event, got {line!r}")
    return max((time for time in times if time is not None), default=None)


def _time_of(body: dict[str, Any]) -> float | None:
    """Return the time of an event's line; a decision's has none of its own."""
    return body.get("time_sec")


def compiler_finding(search: str) -> Finding:
    """See whether there is a compiler for the trainer's kernels.

    Args:
        search: directories that programs are looked for in, as PATH has them.
    """
    found = next((p for name in COMPILERS if (p := shutil.which(name, path=search))), None)
    return Finding(
        name="compiler",
        ok=found is not None,
        must=f"be one of {', '.join(COMPILERS)} on PATH",
        found=one_line(found or "none"),
        fix="install g++, or set train.kernels to torch",
        needed_for="train.kernels: compiled",
    )


def nearest_folder(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    place = folder.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return place


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"


PYTHON = (3, 11)
"""The one version that stored bytes and bit-equal training are tested on (`pyproject.toml`)."""
SHOWN = 5
"""Packages that a finding names."""
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)


def python_finding(version: tuple[int, int]) -> Finding:
    """Compare the interpreter's version with the one that is tested.

    Args:
        version: major and minor.
    """
    return Finding(
        name="python",
        ok=version == PYTHON,
        must=f"be {'.'.join(map(str, PYTHON))}",
        found=".".join(map(str, version)),
        fix="install it, then run make setup PYTHON=/path/to/python3.11",
    )


def wheels_finding(lock: Path, sites: Sequence[str]) -> Finding:
    """Compare the versions of a lock with what is installed.

    Args:
        lock: a requirements file with exact versions.
        sites: directories that are searched for packages, the first one wins.
    """
    must = f"have the versions of {lock.name}"
    fix = f"run make setup, or uv pip sync {lock.name}"
    try:
        wanted = locked(lock.read_text(encoding="utf-8"))
    except OSError as error:
        found = f"no lock: {error.strerror}"
        return Finding(name="wheels", ok=False, must=must, found=found, fix="name another --lock")
    problems = differences(wanted, installed(sites))
    shown = "; ".join(problems[:SHOWN])
    more = f"; {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return Finding(
        name="wheels",
        ok=not problems,
        must=must,
        found=f"{shown}{more}" or f"all {len(wanted)}",
        fix=fix,
    )


def locked(text: str) -> dict[str, str]:
    r"""Return the packages of a lock and their versions, names in their normal form.

    Example:
        >>> locked("absl-py==2.5.1 \\\n    --hash=sha256:0\nPyYAML==6.0 ; python_version > '3'\n")
        {'absl-py': '2.5.1', 'pyyaml': '6.0'}
    """
    return {normal(name): version for name, version in _PINNED.findall(text)}


def installed(sites: Sequence[str]) -> dict[str, str]:
    """Return the packages that some directories hold and their versions."""
    found: dict[str, str] = {}
    for each in distributions(path=list(sites)):
        name: str | None = each.metadata["Name"]
        if name:
            found.setdefault(normal(name), each.version)
    return found


def differences(wanted: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return what lacks or has another version, in the order of names.

    A local part of a version (`+cpu`) is another build of the same.

    Example:
        >>> differences({"a": "1.0", "b": "2.0", "c": "3"}, {"a": "1.0+cpu", "b": "2.1"})
        ['b 2.1 instead of 2.0', 'no c 3']
    """
    problems: list[str] = []
    for name in sorted(wanted):
        version = found.get(name)
        if version is None:
            problems.append(f"no {name} {wanted[name]}")
        elif wanted[name] not in (version, version.partition("+")[0]):
            problems.append(f"{name} {version} instead of {wanted[name]}")
    return problems


def normal(name: str) -> str:
    """Return a package's name as indexes compare it.

    Example:
        >>> normal("Apache_Beam")
        'apache-beam'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


OLDEST_JAVA, NEWEST_JAVA = 11, 17
"""Versions of Java that Flink 1.19 supports."""
FLINK = "builds on Flink (docs/flink.md)"
_TIMEOUT_SEC = 20.0
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


def java_finding(environment: Mapping[str, str], *, needed: bool) -> Finding:
    """Ask the java on PATH for its version.

    Args:
        environment: of the process that is started, its PATH too.
        needed: whether its lack is a failure.
    """
    version, found = java_version(environment)
    return Finding(
        name="java",
        ok=version is not None and OLDEST_JAVA <= version <= NEWEST_JAVA,
        must=f"be of version {OLDEST_JAVA} to {NEWEST_JAVA}",
        found=found,
        fix="install a JDK of version 17, or put it first on PATH",
        needed_for=FLINK,
        needed=needed,
    )


def java_version(environment: Mapping[str, str]) -> tuple[int | None, str]:
    """Return the major version of the java on PATH, None when there is none, and what was found."""
    java = shutil.which("java", path=environment.get("PATH", ""))
    if java is None:
        return None, "none on PATH"
    said = _output([java, "-version"], environment)
    match = _VERSION.search(said)
    version = int(match[1]) if match else None
    return version, one_line(said.splitlines()[0] if match and said else said or "no answer")


def flink_finding(sources: Path, environment: Mapping[str, str], *, needed: bool) -> Finding:
    """See whether the jars that `deploy/flink fetch` brings are in the cache, in these versions.

    Args:
        sources: `deploy/flink` of the source tree.
        environment: for XDG_CACHE_HOME and HOME.
        needed: whether its lack is a failure.
    """
    fix, must = "run python deploy/flink fetch", "be in the cache, in the versions of pom.xml"
    home = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "")) / ".cache")
    try:
        names = ("pom.xml", "requirements.txt")
        digest = hashlib.sha256(b"".join((sources / name).read_bytes() for name in names))
        place = Path(home) / "presage" / "flink" / digest.hexdigest()[:12]
        found = "they are" if place.is_dir() else f"no {place.name} in {place.parent}"
        ok = place.is_dir()
    except OSError as error:
        ok, found, fix = False, f"{error.strerror}: {error.filename}", "run it in the source tree"
    return Finding(
        name="flink jars", ok=ok, must=must, found=found, fix=fix, needed_for=FLINK, needed=needed
    )


def gpu_finding(environment: Mapping[str, str], sites: Sequence[str], *, needed: bool) -> Finding:
    """Ask the driver for its GPUs, and see whether the packages for them are installed.

    Args:
        environment: of the process that is started, its PATH too.
        sites: directories that are searched for packages.
        needed: whether its lack is a failure.
    """
    program = shutil.which("nvidia-smi", path=environment.get("PATH", ""))
    said = _output([program, "-L"], environment) if program else ""
    cards = [line for line in said.splitlines() if line.startswith("GPU ")]
    has_wheels = "fbgemm-gpu" in installed(sites)
    shown = f"{len(cards)} GPUs" if cards else "no GPU that nvidia-smi names"
    return Finding(
        name="gpu",
        ok=bool(cards) and has_wheels,
        must="be there, with the packages of requirements-gpu.lock",
        found=f"{shown}, {'fbgemm-gpu' if has_wheels else 'no fbgemm-gpu'}",
        fix="install NVIDIA's driver, then run uv pip sync requirements-gpu.lock",
        needed_for="train.device: cuda",
        needed=needed,
    )


def kubernetes_finding(cluster: Path | None, output: Path, *, needed: bool) -> Finding:
    """List the Pods of a cluster's namespace, as the scheduler does.

    Args:
        cluster: file of the cluster, None when there is none.
        output: folder of the scheduler.
        needed: whether its lack is a failure.
    """
    ok, found = _pods(cluster, output)
    return Finding(
        name="kubernetes",
        ok=ok,
        must="let the scheduler list the Pods of its namespace",
        found=found,
        fix="name a --cluster file, and give the rights of deploy/kubernetes/base/rbac.yaml",
        needed_for="schedule.driver: kubernetes",
        needed=needed,
    )


def _pods(cluster: Path | None, output: Path) -> tuple[bool, str]:
    if cluster is None:
        return False, "no --cluster file to look at"
    try:
        api = connect(read_cluster(cluster, output))
        try:
            pods, _ = api.list("")
        finally:
            api.close()
    except (PlanError, SchemaError, RefusedError, UnreachableError) as error:
        return False, one_line(str(error))
    return True, f"{len(pods)} Pods at {api.host}"


def _output(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return what a program says, on either stream; what went wrong where it cannot be run."""
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SEC,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout + done.stderr).strip()
