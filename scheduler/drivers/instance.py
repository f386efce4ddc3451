"""The name of a scheduler where others work, too: of its Pods, and of its jobs on a cluster."""

from __future__ import annotations

import secrets
from pathlib import Path

from schemas.manifest import replace_bytes


def instance_of(output: Path) -> str:
    """Return the name of a scheduler: it stays as long as its folder, which is made if need be."""
    path = output / "instance"
    if not path.exists():
        output.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, f"{secrets.token_hex(6)}\n".encode())
    return path.read_text(encoding="utf-8").strip()
