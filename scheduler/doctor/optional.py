"""What only some set-ups need: Java and Flink's jars, a GPU, a cluster of Kubernetes."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from scheduler.doctor.finding import Finding, one_line
from scheduler.doctor.packages import installed
from scheduler.drivers.kubernetes.api import RefusedError, UnreachableError, connect
from scheduler.drivers.kubernetes.settings import read_cluster
from schemas.errors import PlanError, SchemaError

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
