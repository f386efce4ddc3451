"""What callers of a server must present: made, read, and compared."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.flight as fl

from schemas.errors import SchemaError
from trainer.stores.wire import AUTHORIZATION


class TokenCheck(fl.ServerMiddlewareFactory):
    """Turns callers without the token away before anything of theirs is read."""

    def __init__(self, token: str) -> None:
        """Keep what callers must present."""
        self._wanted = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[Any]]) -> None:
        """Compare in constant time."""
        given = headers.get(AUTHORIZATION, [""])[0]
        found = given.encode() if isinstance(given, str) else bytes(given)
        if not hmac.compare_digest(found, self._wanted):
            raise fl.FlightUnauthenticatedError(
                "token must be that of the store's --token-file, got another or none"
            )


def read_token(path: Path) -> str:
    """Return the token in a file, without the spaces around it.

    Raises:
        SchemaError: it is empty, or no line of printable ASCII.
    """
    token = path.read_text(encoding="utf-8").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise SchemaError(
            "token must be one line of printable ASCII, got another text; "
            "write one with head -c 32 /dev/urandom | base64",
            file=str(path),
        )
    return token


def write_token(path: Path) -> str:
    """Write a new token that only its owner may read, and return it; an old one is replaced."""
    path.unlink(missing_ok=True)
    token = secrets.token_urlsafe(32)
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(number, "w", encoding="utf-8") as file:
        file.write(token)
    return token
