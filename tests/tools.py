"""Builds and installs the programs that tests start, so that no test waits: `make tools`.

Each is kept below `~/.cache/presage` (or `$XDG_CACHE_HOME/presage`) for its version, besides the
caches of Go, Maven, npm and uv. A tool that this machine cannot build is left out with the reason.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.cluster.binary import cluster_binary
from tests.cluster.kustomize import PACKAGE, VERSION
from tests.external_tools import (
    build_go_program,
    build_wheel,
    install_environment,
    install_npm_packages,
    install_wheel,
)
from tests.flink import MISSING
from tests.object_store import AZURITE, FAKE_GCS, FAKE_GCS_VERSION, VERSITYGW, VERSITYGW_VERSION
from tests.pipelines.test_runners import PRISM, PRISM_VERSION

REPOSITORY = Path(__file__).resolve().parents[1]


def _flink_jars() -> object:
    if MISSING:
        pytest.skip(f"needs Java 17 and Maven, got no {MISSING} on PATH")
    return subprocess.run([sys.executable, "deploy/flink", "fetch"], cwd=REPOSITORY, check=True)


def _airflow() -> object:
    lock = REPOSITORY / "deploy" / "airflow" / "requirements.lock"
    return install_environment("airflow", lock, REPOSITORY / ".venv" / "bin")


def _environment(name: str) -> Callable[[], object]:
    return lambda: install_wheel(REPOSITORY, REPOSITORY / f"requirements-{name}.lock")


TOOLS: Mapping[str, Callable[[], object]] = {
    "versitygw, an S3 store": lambda: build_go_program(VERSITYGW, VERSITYGW_VERSION),
    "fake-gcs-server": lambda: build_go_program(FAKE_GCS, FAKE_GCS_VERSION),
    "Azurite": lambda: install_npm_packages("azurite", AZURITE),
    "Prism": lambda: build_go_program(PRISM, PRISM_VERSION),
    "kustomize": lambda: build_go_program(PACKAGE, VERSION),
    "servers of Kubernetes": cluster_binary,
    "Flink": _flink_jars,
    "Airflow": _airflow,
    "wheel": lambda: build_wheel(REPOSITORY),
    **{f"environment {name}": _environment(name) for name in ("jobs", "pipelines", "dataflow")},
}


def main() -> int:
    """Prepare all tools; print the seconds of each."""
    for name, prepare in TOOLS.items():
        start = time.monotonic()
        try:
            prepare()
            result = f"{time.monotonic() - start:.0f} s"
        except pytest.skip.Exception as reason:
            result = f"left out: {reason}"
        print(f"{name}: {result}", flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
