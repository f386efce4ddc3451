"""Kustomize: what a folder of manifests comes to."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.external_tools import build_go_program

PACKAGE, VERSION = "sigs.k8s.io/kustomize/kustomize/v5", "v5.7.1"


def objects_of(folder: Path) -> list[dict[str, Any]]:
    """Return what a folder with a kustomization comes to."""
    built = subprocess.run(
        [str(build_go_program(PACKAGE, VERSION)), "build", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return list(yaml.safe_load_all(built.stdout))
