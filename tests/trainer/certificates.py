"""A certificate for loopback, key by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

from presage.trainer.stores.remote.wire import Certificate


def make_certificate(folder: Path) -> Certificate:
    """Write a chain, which is its own authority, and its key."""
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    key = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", "key.pem", "-out", "cert.pem"]
    command = ["openssl", "req", "-x509", *key, *names]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"
