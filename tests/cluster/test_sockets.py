"""What is seen of sockets is what a process did."""

from __future__ import annotations

import os
import socket

import pytest

from tests.cluster.sockets import pids_with, sockets_of

pytestmark = pytest.mark.nightly


def test_sockets_of_a_process_are_where_it_listens_and_whom_it_called() -> None:
    with socket.create_server(("127.0.0.2", 0)) as server:
        at = server.getsockname()
        with socket.create_connection(at) as calling, server.accept()[0]:
            found = sockets_of([os.getpid()])
            assert at in found.listening
            assert at in found.called
            assert calling.getsockname() not in found.called, "that end was called by nobody"
    assert at not in sockets_of([os.getpid()]).listening
    assert sockets_of([]).listening == frozenset()


def test_pids_with_a_variable_are_those_that_began_with_it() -> None:
    path = os.environ["PATH"]
    assert os.getpid() in pids_with("PATH", path)
    assert os.getpid() not in pids_with("PATH", f"{path}:more")
