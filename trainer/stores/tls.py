"""TLS of servers: certificates from files, and what may be sent in the clear."""

from __future__ import annotations

from pathlib import Path

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
Certificate = tuple[Path, Path]
"""PEM files: chain, and its key."""


def check_host(host: str, certificate: Certificate | None) -> None:
    """Refuse to send rows over a network in the clear.

    Raises:
        ValueError: the host is beyond loopback, and there is no certificate.
    """
    if host not in LOOPBACK and certificate is None:
        raise ValueError(
            f"host must be loopback without TLS, got host={host!r}; give --tls-cert and --tls-key"
        )


def read_certificate(certificate: Certificate | None) -> tuple[bytes, bytes] | None:
    """Return chain and key.

    Raises:
        OSError: a file cannot be read.
    """
    if certificate is None:
        return None
    chain, key = certificate
    return chain.read_bytes(), key.read_bytes()


def scheme_of(certificate: Certificate | None) -> str:
    """Return the scheme of a server's address."""
    return "grpc" if certificate is None else "grpc+tls"


def read_trusted(path: Path | None) -> bytes | None:
    """Return the authorities that are trusted, PEM; None for those of the system.

    Raises:
        OSError: the file cannot be read.
    """
    return None if path is None else path.read_bytes()
