"""A job's Secret: created once, never read, deleted with the last process."""

import ssl
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from kubernetes import client

from presage.scheduler.drivers.base import CERTIFICATE, KEY, TOKEN, ExitStatus
from presage.scheduler.drivers.kubernetes.pod_manifest import (
    LIFE,
    Task,
    endpoint_of,
    make_certificate,
    pod_of,
    secret_name,
    secret_of,
)
from tests.cluster.servers import Cluster
from tests.scheduler.kubernetes.pods import config_of, observe_pods
from tests.scheduler.kubernetes.server import FORBIDDEN, SILENT
from tests.scheduler.kubernetes.test_cluster import CONFIG, Followed, followed
from tests.scheduler.kubernetes.test_pods import NEEDS

__all__ = ["followed"]
NAME = "job-0123456789.presage"


def shake_hands(folder: Path, chain: str, key: str, trusted: str, asked: str) -> None:
    """Have a server show a certificate to a client, both in this process.

    Raises:
        SSLError: the client does not take it.
    """
    for name, text in (("chain", chain), ("key", key)):
        (folder / name).write_text(text)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "chain", folder / "key")
    calling = ssl.create_default_context(cadata=trusted)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        calling.wrap_bio(back, there, server_hostname=asked),
        serving.wrap_bio(there, back, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)


def test_make_certificate_is_trusted_by_the_name_that_it_bears_alone(tmp_path: Path) -> None:
    chain, key = make_certificate(NAME, datetime.now(UTC))
    shake_hands(tmp_path, chain, key, chain, NAME)
    other, _ = make_certificate(NAME, datetime.now(UTC))
    for trusted, asked in ((chain, "127.0.0.1"), (chain, "other.presage"), (other, NAME)):
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(tmp_path, chain, key, trusted, asked)


def test_make_certificate_holds_before_and_long_after_its_making() -> None:
    now = datetime(2026, 11, 22, tzinfo=UTC)
    found = x509.load_pem_x509_certificate(make_certificate(NAME, now)[0].encode())
    assert found.not_valid_before_utc < now
    assert found.not_valid_after_utc == now + LIFE


def test_secret_of_is_another_each_time_and_cannot_be_changed() -> None:
    reach = endpoint_of(CONFIG, "a1", "job")
    one, two = (secret_of(CONFIG, "a1", "job", reach) for _ in range(2))
    assert one["immutable"] is True
    assert one["metadata"]["labels"]["app.kubernetes.io/instance"] == "a1"
    for file in (TOKEN, CERTIFICATE, KEY):
        assert one["stringData"][file] != two["stringData"][file]
    assert secret_name("a1", "job") != secret_name("a2", "job")


def test_a_secret_is_there_before_the_pods_that_see_it_and_stays_as_it_is(
    followed: Followed,
) -> None:
    server, pods = followed.server, followed.pods
    pods.start("segment-0.1", [])
    assert not server.secrets
    pods.start("store-0.1", [])
    assert server.calls[-2:] == ["ensure_secret", "apply"]
    before = dict(server.secrets)
    pods.start("coordinator-0.1", [])
    assert list(before) == [secret_name(followed.instance, "job")]
    assert server.secrets == before


def test_a_secret_goes_with_the_last_process_and_the_next_job_has_its_own(
    followed: Followed,
) -> None:
    server, pods = followed.server, followed.pods
    pods.start("coordinator-0.1", [])
    first = dict(server.secrets)
    pods.remove_ended(["coordinator-0.1"])
    assert server.secrets
    pods.start("move-1-to-0.5", [])
    pods.kill("coordinator-0.1")
    followed.until(lambda: not pods.is_alive("coordinator-0.1"))
    pods.remove_ended([])
    assert server.secrets, "a move of slots lives unnamed"
    pods.kill("move-1-to-0.5")
    followed.until(lambda: not pods.is_alive("move-1-to-0.5"))
    pods.remove_ended([])
    assert not server.secrets
    for _ in range(3):
        pods.remove_ended([])
    assert server.calls.count("delete_secret") == 1, "asked once"
    pods.start("coordinator-0.2", [])
    assert server.secrets.keys() == first.keys()
    assert server.secrets != first


def test_a_secret_that_cannot_be_made_now_is_asked_for_again_before_the_pod(
    followed: Followed,
) -> None:
    server, pods = followed.server, followed.pods
    server.fails["ensure_secret"] = SILENT
    pods.start("coordinator-0.1", [])
    assert "apply" not in server.calls
    assert pods.is_alive("coordinator-0.1"), "it waits"
    server.fails.clear()
    followed.until(lambda: followed.name("coordinator-0.1") in server.pods)
    assert server.secrets


def test_a_process_whose_secret_is_refused_ends_with_the_reason(followed: Followed) -> None:
    followed.server.fails["ensure_secret"] = FORBIDDEN
    followed.pods.start("coordinator-0.1", [])
    refused = f"Pod {followed.name('coordinator-0.1')}: no right"
    assert followed.pods.exit_status("coordinator-0.1") == ExitStatus(refused=refused)
    followed.pods.start("segment-0.1", [])
    assert followed.pods.is_alive("segment-0.1"), "it needs none"


def test_a_secret_whose_end_is_not_answered_is_dropped_later(followed: Followed) -> None:
    server, pods = followed.server, followed.pods
    pods.start("coordinator-0.1", [])
    pods.kill("coordinator-0.1")
    followed.until(lambda: not pods.is_alive("coordinator-0.1"))
    server.fails["delete_secret"] = SILENT
    pods.remove_ended([])
    server.fails.clear()
    assert server.secrets

    def is_gone() -> bool:
        pods.remove_ended([])
        return not server.secrets

    followed.until(is_gone)


SHOWS = [
    sys.executable,
    "-c",
    "import os, socket, sys\n"
    "with socket.create_server((sys.argv[1], 0)):\n"
    "    print(sys.argv[1], sorted(os.listdir(sys.argv[2])))\n",
]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_processes_of_pods_see_their_address_and_what_is_their_jobs(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    api = cluster.core()
    with observe_pods(config_of(cluster, namespace, tmp_path), tmp_path) as observer:
        reach = observer.pods.endpoint
        assert reach is not None
        for name in ("replica-0.1", "replica-1.1"):
            observer.pods.start(name, [*SHOWS, reach.host, reach.folder], NEEDS)
            observer.until_ended(name)
            assert observer.pods.exit_status(name) == ExitStatus(status=0), (
                observer.pods.last_stderr_line(name)
            )
        outputs = [
            observer.pods.output(name).split(" ", 1) for name in ("replica-0.1", "replica-1.1")
        ]
        addresses = {pod.status.pod_ip for pod in api.list_namespaced_pod(namespace).items}
        assert {address for address, _ in outputs} == addresses
        assert len(addresses) == 2
        assert {files for _, files in outputs} == {"['tls.crt', 'tls.key', 'token']\n"}
        (secret,) = api.list_namespaced_secret(namespace).items
        assert secret.immutable
        observer.pods.remove_ended([])
        observer.until(lambda: not api.list_namespaced_secret(namespace).items)


@pytest.mark.slow
def test_the_shipped_network_policy_is_one_and_holds_for_every_pod(
    repository: Path, cluster: Cluster, namespace: str
) -> None:
    policy = yaml.safe_load(
        (repository / "deploy" / "kubernetes" / "base" / "network.yaml").read_text()
    )
    (rule,) = policy["spec"]["ingress"]
    selected = policy["spec"]["podSelector"]["matchLabels"]
    assert rule == {"from": [{"podSelector": {"matchLabels": selected}}]}
    for name in ("segment-0.1", "coordinator-0.1", "replica-1.2", "store-0.1", "move-1-to-2.3"):
        task = Task(job="job", name=name, command=[], request=NEEDS)
        labels = pod_of(CONFIG, "a1", task)["metadata"]["labels"]
        assert selected.items() <= labels.items()
    network: Any = client.NetworkingV1Api(cluster.client())
    policy["metadata"]["namespace"] = namespace
    network.create_namespaced_network_policy(namespace, policy)
    (found,) = network.list_namespaced_network_policy(namespace).items
    assert found.spec.policy_types == ["Ingress"]
