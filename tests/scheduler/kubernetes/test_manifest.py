"""Names, configuration and the Pod of a process."""

import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.scheduler.drivers.base import NO_RESOURCES, ResourceRequest
from presage.scheduler.drivers.kubernetes.pod_manifest import (
    ClusterConfig,
    Task,
    check_volumes,
    endpoint_of,
    label_value,
    pod_name,
    pod_of,
    read_cluster,
    resize_patch,
    secret_name,
)
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location

LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
FILE = """\
namespace: training
image: registry.example/presage:1
kubeconfig: admin.conf
python: [/opt/venv/bin/python]
pod_template:
  metadata: {labels: {team: ads, presage/job: x}}
  spec:
    nodeSelector: {pool: spot}
    serviceAccountName: trainer
    securityContext: {runAsUser: 1000}
    restartPolicy: Always
    containers:
      - name: main
        env: [{name: PYTHONPATH, value: /opt/presage}]
        resources: {limits: {ephemeral-storage: 20Gi, cpu: 9}}
        volumeMounts:
          - {name: data, mountPath: /data}
          - {name: logs, mountPath: /logs, readOnly: true}
    volumes:
      - {name: data, persistentVolumeClaim: {claimName: presage}}
      - {name: logs, hostPath: {path: /mnt/logs}}
grace: 90s
"""


@given(st.text(max_size=200), st.text(max_size=200))
def test_pod_name_is_one_label_whatever_a_job_is_called(job: str, process: str) -> None:
    assert LABEL.fullmatch(pod_name("a1", job, process))
    assert VALUE.fullmatch(label_value(job))


def test_pod_name_differs_for_different_processes() -> None:
    long = "x" * 300
    many = [
        pod_name(instance, job, process)
        for instance in ("a1", "a2")
        for job in ("a", "A", "a-b", "a_b", long, f"{long}y")
        for process in ("segment-0.1", "segment-0.11", "segment-01.1", "segment-0-1")
    ]
    assert len(set(many)) == len(many)


def read(
    tmp_path: Path, text: str = FILE, storage: str = "/data/scheduled", log: str = "/logs/a"
) -> ClusterConfig:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    config = read_cluster(path)
    check_volumes(config, path, Location.parse(storage), [Location.parse(log)])
    return config


def task(name: str = "replica-2.3", request: ResourceRequest = NO_RESOURCES) -> Task:
    command = [sys.executable, "-m", "presage.trainer", "replica"]
    return Task(job="Demo_1", name=name, command=command, request=request)


def test_pod_of_has_what_is_booked_and_what_the_file_says(tmp_path: Path) -> None:
    pod = pod_of(
        read(tmp_path), "a1", task(request=ResourceRequest(cpus=1.5, memory_bytes=1 << 30))
    )
    spec = pod["spec"]
    (container,) = spec["containers"]
    booked = {"cpu": "1500m", "memory": "1073741824"}
    limits = {"ephemeral-storage": "20Gi", **booked}
    assert container["resources"] == {"requests": booked, "limits": limits}
    output, program = container["command"][3], container["command"][4:]
    assert output == container["terminationMessagePath"] == "/dev/termination-log"
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert program == ["/opt/venv/bin/python", "-m", "presage.trainer", "replica"]
    assert container["env"][0] == {"name": "PYTHONPATH", "value": "/opt/presage"}
    assert container["volumeMounts"][:-1] == [
        {"name": "data", "mountPath": "/data"},
        {"name": "logs", "mountPath": "/logs", "readOnly": True},
        {"name": "work", "mountPath": "/var/lib/presage"},
        {"name": "memory", "mountPath": "/dev/shm"},
    ]
    assert spec["volumes"][:-1] == [
        {"name": "data", "persistentVolumeClaim": {"claimName": "presage"}},
        {"name": "logs", "hostPath": {"path": "/mnt/logs"}},
        {"name": "work", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    assert spec["restartPolicy"] == "Never"
    assert spec["terminationGracePeriodSeconds"] == 90
    assert spec["automountServiceAccountToken"] is False
    assert (spec["nodeSelector"], spec["serviceAccountName"]) == ({"pool": "spot"}, "trainer")
    assert spec["securityContext"]["runAsUser"] == 1000
    assert pod["metadata"]["labels"] == {
        "team": "ads",
        "app.kubernetes.io/managed-by": "presage-scheduler",
        "app.kubernetes.io/instance": "a1",
        "presage/job": "Demo_1",
        "presage/pool": "replica",
        "presage/process": "replica-2.3",
    }


def test_pod_of_a_trainer_on_a_gpu_asks_for_one(tmp_path: Path) -> None:
    request = ResourceRequest(cpus=2.0, memory_bytes=1 << 30, gpus=1)
    (container,) = pod_of(read(tmp_path), "a1", task(request=request))["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    smaller = resize_patch(ResourceRequest(cpus=1.0, memory_bytes=1 << 29))
    (patched,) = smaller["spec"]["containers"]
    assert "nvidia.com/gpu" not in patched["resources"]["limits"]  # merged into what it has


def test_pod_of_sees_its_own_address_and_what_is_its_jobs(tmp_path: Path) -> None:
    config = read(tmp_path)
    pod = pod_of(config, "a1", task("store-0.1"))
    (container,) = pod["spec"]["containers"]
    name, folder = secret_name("a1", "Demo_1"), f"/run/presage/{secret_name('a1', 'Demo_1')}"
    own = {"name": "PRESAGE_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    assert own in container["env"]
    mount = {"name": "secret", "mountPath": folder, "readOnly": True}
    assert mount in container["volumeMounts"]
    secret = {"secretName": name, "defaultMode": 0o444}
    assert {"name": "secret", "secret": secret} in pod["spec"]["volumes"]
    reach = endpoint_of(config, "a1", "Demo_1")
    assert (reach.host, reach.folder) == ("$(PRESAGE_HOST)", folder)


def test_pod_of_a_segment_job_sees_nothing_of_that(tmp_path: Path) -> None:
    pod = pod_of(read(tmp_path), "a1", task("segment-0.1"))
    (container,) = pod["spec"]["containers"]
    assert [one["name"] for one in container["env"]] == ["PYTHONPATH"]
    assert not [one for one in pod["spec"]["volumes"] if "secret" in one]


def test_pod_of_a_store_keeps_its_output_in_the_log(tmp_path: Path) -> None:
    (container,) = pod_of(read(tmp_path), "a1", task("store-0.1"))["spec"]["containers"]
    assert container["command"][0] == "/opt/venv/bin/python"


AT_A_URL = "namespace: a\nimage: b\n"


def test_pods_of_a_job_at_a_url_need_no_volume(tmp_path: Path) -> None:
    config = read(tmp_path, AT_A_URL, "s3://bucket/scheduled", "s3://bucket/log")
    assert config == ClusterConfig(namespace="a", image="b")
    spec = pod_of(config, "a1", task("segment-0.1"))["spec"]
    assert [sorted(volume) for volume in spec["volumes"]] == [["emptyDir", "name"]] * 2


def test_pod_of_a_process_for_which_nothing_is_booked_has_no_limit() -> None:
    (container,) = pod_of(ClusterConfig(namespace="a", image="b"), "a1", task())["spec"][
        "containers"
    ]
    assert "limits" not in container["resources"]


def test_pod_of_is_the_same_each_time(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert pod_of(config, "a1", task()) == pod_of(config, "a1", task())


REFUSED = {
    "an output that Pods only read": (
        FILE,
        "/logs/scheduled",
        "Pods cannot write to /logs/scheduled, which none of their volumes has in {}; give "
        "--storage a URL or a path below /data",
    ),
    "an input that Pods do not see": (
        AT_A_URL,
        "s3://bucket/scheduled",
        "Pods cannot read /logs/a, which none of their volumes has in {}; give --input a URL",
    ),
    "a second container": (
        FILE.replace("name: main", "name: other"),
        "/data/scheduled",
        "pod_template must have no container besides 'main', got ['other'] in {}:1; rename it",
    ),
    "a template of another shape": (
        FILE.replace("- name: main", "- main: 1"),
        "/data/scheduled",
        "pod_template is not a PodTemplateSpec: KeyError('name') in {}:1; write it as in a Pod",
    ),
    "no grace": (
        FILE.replace("grace: 90s", "grace: 100ms"),
        "/data/scheduled",
        "grace must be at least 1s, got 0.1s in {}:1; raise it",
    ),
    "a folder of secrets that may be anywhere": (
        FILE + "secrets: keys\n",
        "/data/scheduled",
        "secrets must be absolute, got 'keys' in {}:1; write the full path",
    ),
    "a key that is none": (
        FILE.replace("image:", "images:"),
        "/data/scheduled",
        "unknown key: images in {}:2; did you mean 'image'?",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_read_cluster_of_what_is_none_says_why(name: str, tmp_path: Path) -> None:
    text, output, message = REFUSED[name]
    with pytest.raises(SchemaError, match=re.escape(message.format(tmp_path / "cluster.yaml"))):
        read(tmp_path, text, output)
