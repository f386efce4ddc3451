"""A dataset at an S3 store on this machine, behind a proxy that counts requests and delays them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.common.logs import MissingError
from presage.schemas.storage.location import Location
from tests.fault_proxy import Faults, fault_proxy
from tests.object_store import new_url, s3_environment, s3_server


@contextmanager
def at_store(dataset: Path, faults: Faults) -> Generator[Location]:
    """Copy a dataset to a store, set the environment of its clients, and yield its place.

    Raises:
        MissingError: the store's server cannot be built.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            endpoint = stack.enter_context(s3_server(folder))
        except pytest.skip.Exception as error:
            raise MissingError(f"the store's server must be built: {error}") from error
        os.environ.update(s3_environment(stack.enter_context(fault_proxy(endpoint, faults))))
        target = Location.parse(new_url())
        for entry in Location.parse(dataset).entries():
            (target / entry.path).upload(dataset / entry.path)
        yield target
