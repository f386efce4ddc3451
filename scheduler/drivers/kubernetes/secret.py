"""What the processes of one job know, and nobody else: their token, their certificate, its key.

One certificate for all: an address is known when its Pod is there, and Pods come and go, so the
certificate bears the name of the job's Secret, which callers ask for in the place of an address.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from scheduler.drivers.kubernetes.names import labels_of, secret_name
from scheduler.drivers.kubernetes.settings import ClusterConfig
from scheduler.drivers.processes import CHAIN, KEY, TOKEN, Reach

SELF = "PRESAGE_HOST"
"""Variable of a Pod with its own address."""
LIFE = timedelta(days=3650)
"""Longer than a job: its certificate goes with it, and is not renewed."""
SKEW = timedelta(hours=1)
"""Clocks of nodes may differ by so much."""


def reach_of(config: ClusterConfig, instance: str, job: str) -> Reach | None:
    """Return how processes of a job reach each other, None where their Pods share one loopback.

    Args:
        config: of the cluster.
        instance: of the scheduler.
        job: its name.
    """
    if config.shared_loopback:
        return None
    name = secret_name(instance, job)
    # The node puts the address there, as for each `$(NAME)` of a variable that it knows.
    return Reach(host=f"$({SELF})", folder=f"{config.secrets}/{name}", name=f"{name}.presage")


def secret_of(config: ClusterConfig, instance: str, job: str, reach: Reach) -> dict[str, Any]:
    """Return a job's Secret, with a new token and a new key."""
    chain, key = make_certificate(reach.name, datetime.now(UTC))
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(instance, job),
            "namespace": config.namespace,
            **labels_of(instance, job),
        },
        "immutable": True,
        "stringData": {TOKEN: secrets.token_urlsafe(32), CHAIN: chain, KEY: key},
    }


def make_certificate(name: str, now: datetime) -> tuple[str, str]:
    """Return a certificate that is its own authority, and its key, as PEM.

    Args:
        name: that it bears, and no other.
        now: the time, with its zone.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "presage")])
    names = x509.SubjectAlternativeName([x509.DNSName(name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + LIFE)
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form, clear = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return made.public_bytes(pem).decode(), key.private_bytes(pem, form, clear).decode()
