"""What a node reads from a Pod is what Kubernetes says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from tests.cluster import pods
from tests.cluster.pods import Pod

pytestmark = pytest.mark.nightly


def a_pod(restart_policy: str = "Never", **container: Any) -> Pod:
    main = {"name": "main", "image": "none", "command": ["run"], **container}
    main.setdefault("termination_message_path", "/dev/termination-log")
    return client.V1Pod(
        metadata=client.V1ObjectMeta(name="one", namespace="here", uid="1-2", generation=3),
        spec=client.V1PodSpec(
            containers=[client.V1Container(**main)],
            node_name="node-0",
            restart_policy=restart_policy,
        ),
    )


def a_field(name: str, path: str) -> client.V1EnvVar:
    source = client.V1EnvVarSource(field_ref=client.V1ObjectFieldSelector(field_path=path))
    return client.V1EnvVar(name=name, value_from=source)


def test_environment_refers_to_what_stands_before_it() -> None:
    variables = [
        client.V1EnvVar(name="FOLDER", value="$(ROOT)/jobs"),
        a_field("NAME", "metadata.name"),
        client.V1EnvVar(name="PLACE", value="$(FOLDER)/$(NAME) $(LATER) $$(NAME)"),
        client.V1EnvVar(name="LATER", value="x"),
        client.V1EnvVar(name="EMPTY"),
    ]
    assert pods.environment(a_pod(env=variables), {"ROOT": "/out"}) == {
        "ROOT": "/out",
        "FOLDER": "/out/jobs",
        "NAME": "one",
        "PLACE": "/out/jobs/one $(LATER) $(NAME)",
        "LATER": "x",
        "EMPTY": "",
    }


def test_command_and_arguments_refer_to_the_environment() -> None:
    pod = a_pod(command=["run", "--to=$(A)"], args=["$(A)$(B)"])
    assert pods.command(pod, {"A": "1"}) == ["run", "--to=1", "1$(B)"]


def two_containers() -> Pod:
    pod = a_pod()
    pod.spec.containers *= 2
    return pod


OF_SECRET = client.V1EnvVarSource(
    secret_key_ref=client.V1SecretKeySelector(name="secret", key="key")
)
REFUSED = {
    "it would be started again": (
        a_pod(restart_policy="Always"),
        "restartPolicy must be Never, got Always",
    ),
    "there are two containers": (
        two_containers(),
        "a node of processes runs Pods of one container; leave out the others",
    ),
    "only an image is given": (
        a_pod(command=None),
        "a node of processes has no images; give the container a command",
    ),
    "a variable comes from a secret": (
        a_pod(env=[client.V1EnvVar(name="KEY", value_from=OF_SECRET)]),
        "variable KEY must be a value or one of metadata.name, metadata.namespace, metadata.uid, "
        "spec.nodeName, spec.serviceAccountName, status.podIP, status.hostIP",
    ),
    "nothing is wrong": (a_pod(), None),
}


@pytest.mark.parametrize(("pod", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_unsupported_pod_is_told_why(pod: Pod, why: str | None) -> None:
    assert pods.unsupported(pod) == why


LOG = "".join(f"line {index}\n" for index in range(300))
FALLS_BACK = {"termination_message_policy": "FallbackToLogsOnError"}


def test_message_of_failed_container_is_the_end_of_its_log(tmp_path: Path) -> None:
    log, written = tmp_path / "log", tmp_path / pods.MESSAGE
    written.touch()
    log.write_text(LOG)
    assert pods.message(a_pod(**FALLS_BACK), written, log, 1) == LOG[-80 * len("line 299\n") :]
    assert pods.message(a_pod(**FALLS_BACK), written, log, 0) == ""
    assert pods.message(a_pod(), written, log, 1) == ""
    log.write_text("x" * 5000)
    assert pods.message(a_pod(**FALLS_BACK), written, log, 1) == "x" * 2048


@pytest.mark.parametrize("code", [0, 1])
def test_message_that_a_container_wrote_comes_before_its_log(code: int, tmp_path: Path) -> None:
    log, written = tmp_path / "log", tmp_path / pods.MESSAGE
    log.write_text(LOG)
    written.write_text("no such table")
    assert pods.message(a_pod(**FALLS_BACK), written, log, code) == "no such table"
    written.write_text("x" + "y" * 4096)
    assert pods.message(a_pod(), written, log, code) == "y" * 4096


def test_paths_of_a_containers_own_files_are_those_of_its_node(tmp_path: Path) -> None:
    mounts = [
        client.V1VolumeMount(name="work", mount_path="/own"),
        client.V1VolumeMount(name="shared", mount_path="/shared"),
    ]
    words = ["run", "/own", "/own/a", "/owner", "/shared/a", "/dev/termination-log"]
    pod = a_pod(command=words, volume_mounts=mounts)
    pod.spec.volumes = [
        client.V1Volume(name="work", empty_dir=client.V1EmptyDirVolumeSource()),
        client.V1Volume(name="shared", host_path=client.V1HostPathVolumeSource(path="/shared")),
    ]
    own, message = str(tmp_path / "work"), str(tmp_path / pods.MESSAGE)
    found = pods.command(pod, {}, pods.mounts(pod, tmp_path))
    assert found == ["run", own, f"{own}/a", "/owner", "/shared/a", message]


def test_variables_come_from_secrets_and_config_maps() -> None:
    named = [
        client.V1EnvFromSource(secret_ref=client.V1SecretEnvSource(name="keys")),
        client.V1EnvFromSource(config_map_ref=client.V1ConfigMapEnvSource(name="store")),
    ]
    assert pods.sources(a_pod(env_from=named)) == [("Secret", "keys"), ("ConfigMap", "store")]
    assert pods.sources(a_pod()) == []


def test_resources_leave_out_what_is_not_given() -> None:
    wanted = client.V1ResourceRequirements(requests={"cpu": "250m", "memory": "1Gi"}, limits={})
    found = pods.resources(a_pod(resources=wanted))
    assert found == {"requests": {"cpu": "250m", "memory": "1Gi"}}
    assert pods.resources(a_pod()) == {}
    assert pods.amount(found, "requests", "cpu") == 0.25
    assert pods.amount(found, "requests", "memory") == 2**30
    assert pods.amount(found, "limits", "memory") == 0
    assert pods.requested([found, found, {}], "cpu") == 0.5
