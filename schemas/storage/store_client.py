"""Clients of object stores: endpoints, credentials, time-outs, and errors in one line.

Endpoints and credentials come from the variables and files of each store's own tools; what those
read and `object_store` does not is added here. See `docs/storage.md`.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore import exceptions as e
from obstore.store import MemoryStore, from_url

from presage.schemas.errors import StorageError

T = TypeVar("T")

ATTEMPTS = 8
"""Attempts of a request whose outcome is unknown, or that was in conflict with another."""
RETRY_SEC, TIMEOUT_SEC, READ_SEC, CONNECT_SEC = 90, 300, 30, 10
"""Time for all attempts of a request, for one of them, without any byte, and for connecting."""
MAX_RETRIES = 50
"""More than fit into that time."""
FIRST_BACKOFF = timedelta(milliseconds=100)
"""Shortest pause before a request is repeated."""
METADATA_SEC = 1.0
"""Time in which the credentials service of a virtual machine must accept a connection."""
METADATA_ADDRESS = "http://169.254.169.254"
ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("STORAGE_EMULATOR_HOST",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURE_STORAGE_SERVICE_ENDPOINT"),
}
"""Variables with the address of a store, by scheme; the first that is set wins."""
CREDENTIALS = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_SKIP_SIGNATURE",
    ),
    "gs": (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        "GOOGLE_BEARER_TOKEN",
        "GOOGLE_SKIP_SIGNATURE",
    ),
    "az": (
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_CLIENT_SECRET",
        "AZURE_FEDERATED_TOKEN_FILE",
        "AZURE_STORAGE_TOKEN",
        "AZURE_SKIP_SIGNATURE",
        "IDENTITY_ENDPOINT",
    ),
}
"""Variables that say where credentials are, by scheme."""
MISSING_OBJECT = ("", "NoSuchKey", "BlobNotFound")
"""Codes of a reply 404 about an object; there are others, such as for an unknown access key."""


class RefusedError(StorageError):
    """Another attempt would be refused, too."""


class ShorterError(StorageError):
    """A range ends beyond the file."""


class ConflictError(StorageError):
    """A condition was not met, or the store says so of a request without a condition."""


def call(url: str, action: Callable[[Any], T], *, conditional: bool = False) -> T:
    """Call functions of obstore, which repeats failed requests; raise its errors as ours.

    It does not repeat a deletion of several objects, a copy or a conditional put whose connection
    broke, since it cannot know that here they may be carried out twice. `conditional` requests
    have a condition that may not be met.

    Raises:
        FileNotFoundError: there is no such file.
        StorageError: the store failed, or refuses the request.
    """
    ends = time.monotonic() + RETRY_SEC
    for attempt in range(ATTEMPTS):
        try:
            return action(obstore)
        except BaseException as error:
            found, again = _translate(error, url, in_time=time.monotonic() < ends)
            again = again and not (conditional and isinstance(found, ConflictError))
            if found is error:
                raise
            if not again or attempt == ATTEMPTS - 1:
                raise found from (None if isinstance(found, FileNotFoundError) else error)
        pause(attempt)
    raise AssertionError("the last attempt returns or raises")


def _translate(error: BaseException, url: str, *, in_time: bool) -> tuple[BaseException, bool]:
    """Return an error of obstore as one of ours, and whether another attempt may succeed.

    One whose request failed to be sent before the time for all attempts was not repeated.

    obstore maps the status of some replies to classes of errors, but not that of a listing.
    """
    text, code = str(error), _code(error)
    is_missing = isinstance(error, FileNotFoundError) and code in MISSING_OBJECT
    if is_missing or "(code: NoSuchKey)" in text:  # the latter of one of several deletions
        return FileNotFoundError(errno.ENOENT, "no such object", url), False
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return RefusedError("bucket does not exist; create it", file=url), False
    if code == "InvalidRange" or type(error).__name__ == "PanicException":
        return ShorterError("file is shorter than expected; restore it", file=url), False
    conflicts = (e.AlreadyExistsError, e.PreconditionError)
    if isinstance(error, conflicts) or "409 Conflict" in text:
        return ConflictError(cause(error), file=url), True
    refusals = (e.PermissionDeniedError, e.UnauthenticatedError, FileNotFoundError)
    if isinstance(error, refusals) or re.search("40[134] (Forbidden|Unauthorized|Not Found)", text):
        advice = "check the credentials"
        return RefusedError(f"store refuses access: {cause(error)}; {advice}", file=url), False
    if isinstance(error, (e.InvalidPathError, e.NotSupportedError, ValueError)):
        return RefusedError(f"store refuses: {cause(error)}; choose another name", file=url), False
    if isinstance(error, e.BaseError):
        advice = "try again when it is reachable"
        failed = StorageError(f"store failed: {cause(error)}; {advice}", file=url)
        return failed, "response body" in text or ("error sending request" in text and in_time)
    return error, False


def _code(error: BaseException) -> str:
    code = re.search("<Code>(.*?)</Code>", str(error))
    return code[1] if code else ""


def pause(attempt: int) -> None:
    """Wait before another attempt, twice as long each time up to 8 seconds."""
    time.sleep(random.uniform(0.5, 1.0) * min(8.0, 0.1 * 2**attempt))


def cause(error: BaseException) -> str:
    r"""Return code and message of a store's reply, or the first line of an error.

    Example:
        >>> cause(ValueError("PUT failed: <Code>SlowDown</Code><Message>Wait.</Message>"))
        'SlowDown: Wait'
        >>> cause(ValueError("\nno route to host;\ndebug source: ..."))
        'no route to host'
    """
    text, code = str(error), _code(error)
    if code:
        message = re.search("<Message>(.*?)</Message>", text, re.DOTALL)
        text = f"{code}: {message[1]}" if message else code
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0][:300] if lines else type(error).__name__).replace(";", ",").rstrip(" .,")


_MEMORY: dict[str, Any] = {}
_MEMORY_LOCK = threading.Lock()
_first_process: int | None = None


def store_of(root: str) -> Any:
    """Return the client of a bucket, given as `scheme://bucket`.

    Raises:
        StorageError: there are no credentials, or the process was forked from one that uses a
            store: threads and connections of the client do not survive a fork, and its use in the
            child would stop the parent's.
    """
    global _first_process
    _first_process = _first_process or os.getpid()
    if os.getpid() != _first_process:
        raise RefusedError(
            "process was forked from one that uses an object store; start it by spawn", file=root
        )
    if root.startswith("memory://"):
        with _MEMORY_LOCK:
            return _MEMORY.setdefault(root, MemoryStore())
    return open_store(root, endpoint_of(root.partition("://")[0]))


@lru_cache(maxsize=64)
def open_store(root: str, endpoint: str) -> Any:
    """Return the client of a bucket at an endpoint, or at the store's own if that is ''."""
    scheme = root.partition("://")[0]
    client: Any = {
        "timeout": f"{TIMEOUT_SEC}s",
        "read_timeout": f"{READ_SEC}s",
        "connect_timeout": f"{CONNECT_SEC}s",
        "allow_http": endpoint.startswith("http://"),
    }
    backoff = {
        "init_backoff": FIRST_BACKOFF,
        "max_backoff": timedelta(seconds=5),
        "base": 4,  # a pause is drawn from [FIRST_BACKOFF, base x the last]; below e none grows
    }
    retry: Any = {
        "max_retries": MAX_RETRIES,
        "retry_timeout": timedelta(seconds=RETRY_SEC),
        "backoff": backoff,
    }
    try:
        more = {"s3": _s3_options, "gs": _gcs_options, "az": _azure_options}[scheme](endpoint)
        return from_url(root, client_options=client, retry_config=retry, **more)
    except (e.BaseError, ValueError) as error:
        raise RefusedError(
            f"store cannot be used: {cause(error)}; see docs/storage.md", file=root
        ) from error


def endpoint_of(scheme: str) -> str:
    """Return the endpoint that the store's own tools read from the environment, or ''."""
    names = ENDPOINTS[scheme]
    parts = _connection_string() if scheme == "az" else {}
    return parts.get("BlobEndpoint") or next((os.environ[n] for n in names if n in os.environ), "")


def _connection_string() -> dict[str, str]:
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    return {part.partition("=")[0]: part.partition("=")[2] for part in text.split(";")}


def _s3_options(endpoint: str) -> dict[str, Any]:
    """Only boto3 reads profiles, SSO and assumed roles: it is asked if it is installed."""
    options: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    if _has_variable("s3"):
        return options
    try:
        boto3 = import_module("obstore.auth.boto3")
        return options | {"credential_provider": boto3.Boto3CredentialProvider()}
    except (ImportError, ValueError):
        address = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or METADATA_ADDRESS
        _check_metadata(address, "AWS_ACCESS_KEY_ID, or install boto3 to use a profile")
        return options | {"metadata_endpoint": address}


def _gcs_options(endpoint: str) -> dict[str, Any]:
    if endpoint:  # an emulator, which checks no token
        return {"config": {"base_url": endpoint, "bearer_token": "emulator"}}
    defaults = Path.home() / ".config" / "gcloud" / "application_default_credentials.json"
    if not _has_variable("gs") and not defaults.exists():
        host = os.environ.get("GCE_METADATA_HOST") or os.environ.get("GCE_METADATA_IP")
        address = f"http://{host}" if host else METADATA_ADDRESS
        login = "gcloud auth application-default login"
        _check_metadata(address, f"GOOGLE_APPLICATION_CREDENTIALS, or run {login}")
    return {}


def _azure_options(endpoint: str) -> dict[str, Any]:
    """Add the names of variables that the command `az` reads, and its login."""
    parts = _connection_string()
    account = parts.get("AccountName") or os.environ.get("AZURE_STORAGE_ACCOUNT")
    if not endpoint and account and "EndpointSuffix" in parts:
        endpoint = f"https://{account}.blob.{parts['EndpointSuffix']}"
    config = {
        "account_name": account,
        "account_key": parts.get("AccountKey") or os.environ.get("AZURE_STORAGE_KEY"),
        "sas_token": parts.get("SharedAccessSignature"),
        "endpoint": endpoint,
    }
    options: dict[str, Any] = {key: value for key, value in config.items() if value}
    if not _has_variable("az"):
        try:
            address = os.environ.get("AZURE_MSI_ENDPOINT") or METADATA_ADDRESS
            _check_metadata(address, "AZURE_STORAGE_KEY, or run az login")
        except ValueError:
            if shutil.which("az") is None:
                raise
            options["use_azure_cli"] = True
    return {"config": options}


def _has_variable(scheme: str) -> bool:
    return any(os.environ.get(name) for name in CREDENTIALS[scheme])


def _check_metadata(address: str, advice: str) -> None:
    """Raise ValueError unless a machine's credentials service accepts connections."""
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname, parts.port or 80), METADATA_SEC).close()
    except OSError:
        raise ValueError(f"no credentials found, set {advice}") from None
