"""Options of the processes that others are served by: replicas and stores."""

from __future__ import annotations

import argparse
from pathlib import Path

TLS_NAME = "that the others' certificates bear; the host of their address when left out"


def add_replica(parser: argparse.ArgumentParser) -> None:
    """Add what a replica is told."""
    parser.add_argument("run", type=Path, help="run folder that train --replicas has begun")
    parser.add_argument("--number", type=int, required=True, help="of this replica, from 0")
    parser.add_argument("--host", default="127.0.0.1", help="beyond loopback only with TLS")
    _add_tls(parser, "authorities of other replicas, PEM")
    parser.add_argument("--token-file", type=Path, help="of the replicas; RUN/token when left out")
    parser.add_argument("--expected", type=positive, default=1, help="replicas to wait for")
    parser.add_argument("--threads", type=positive, default=1, help="leaves computed at once")
    parser.add_argument("--faults", default="[]", help="faults that are to happen, as JSON")
    parser.add_argument("--end-with-stdin", action="store_true", help="end when stdin does")


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add what a store is told."""
    parser.add_argument("--directory", type=Path, required=True, help="where its log lies")
    parser.add_argument("--token-file", type=Path, required=True, help="what callers must present")
    parser.add_argument("--host", default="127.0.0.1", help="beyond loopback only with TLS")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--slots", default="0:4096", help="START:END of 4,096[,...], or none")
    _add_tls(parser, "authorities of other stores, PEM")
    parser.add_argument("--fsync", choices=("checkpoint", "write"), default="checkpoint")
    parser.add_argument("--message-bytes", type=positive, default=4 << 20)
    parser.add_argument("--in-flight-bytes", type=positive, default=64 << 20)
    parser.add_argument("--delay-sec", type=float, default=0.0, help="hold every answer back")
    parser.add_argument("--end-with-stdin", action="store_true", help="end when stdin does")


def _add_tls(parser: argparse.ArgumentParser, trusted: str) -> None:
    parser.add_argument("--tls-cert", type=Path, help="certificate chain, PEM")
    parser.add_argument("--tls-key", type=Path, help="its key, PEM")
    parser.add_argument("--trusted", type=Path, help=trusted)
    parser.add_argument("--tls-name", help=TLS_NAME)


def positive(text: str) -> int:
    """Return a number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def not_negative(text: str) -> int:
    """Return a number from 0 on."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return number
