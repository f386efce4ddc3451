"""The flex template: its parameters, and the graph that its launcher sends, run to the end."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import util
from pathlib import Path
from types import ModuleType
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from presage.pipelines.transforms.fit import fitted_files
from presage.schemas.dataset.fitted import FITTED_DIRECTORY, VOCABULARIES
from presage.schemas.storage.location import MANIFESTS, Location
from tests import gcs_api
from tests.external_tools import install_wheel
from tests.fault_proxy import Faults, fault_proxy
from tests.object_store import gcs_server
from tests.pipelines.logs import bytes_of
from tests.pipelines.private_workers import without_paths, without_sources, worker_pool, write_input
from tests.pipelines.repeated_bundles import DO_FNS, FUNCTIONS

pytestmark = pytest.mark.nightly

BUCKET = "shop-presage"
FITTED = (VOCABULARIES, FITTED_DIRECTORY)
RUN = """
import sys
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2, endpoints_pb2
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

graph = beam_runner_api_pb2.Pipeline.FromString(open(sys.argv[1], "rb").read())
pool = beam_runner_api_pb2.ExternalPayload(
    endpoint=endpoints_pb2.ApiServiceDescriptor(url=sys.argv[2])
)
for environment in graph.components.environments.values():
    environment.urn = common_urns.environments.EXTERNAL.urn
    environment.payload = pool.SerializeToString()
runner = FnApiRunner()
runner._num_workers = 2
runner.run_via_runner_api(graph, PipelineOptions([])).wait_until_finish()
"""
"""What Dataflow does with a graph, with processes of a pool instead of containers."""
COPY = """
import sys
from pathlib import Path
from presage.schemas.storage.location import Location

for entry in Location.parse(sys.argv[1]).entries():
    path = Path(sys.argv[2], entry.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((Location.parse(sys.argv[1]) / entry.path).read_bytes())
"""


@pytest.fixture
def template(repository: Path) -> ModuleType:
    path = repository / "deploy" / "dataflow" / "template.py"
    found = util.spec_from_file_location("template", path)
    assert found is not None
    assert found.loader is not None
    module = util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def parameters(repository: Path) -> dict[str, dict[str, object]]:
    path = repository / "deploy" / "dataflow" / "template.json"
    return {p["name"]: p for p in json.loads(path.read_text())["parameters"]}


def test_metadata_names_the_parameters_that_the_launcher_takes(
    template: ModuleType, repository: Path
) -> None:
    accepted = {
        action.dest: not action.required
        for action in template.parser()._actions
        if action.dest != "help"
    }
    documented = {name: bool(p.get("isOptional")) for name, p in parameters(repository).items()}
    assert documented == accepted


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("job", ["/opt/job.yaml", "gs://bucket/a/b.yml"], ["s3://bucket/job.yaml", "/opt/job"]),
        ("input", ["/mnt/log", "gs://bucket/log"], ["log", "s3://bucket/log"]),
        ("output", ["/mnt/dataset", "gs://bucket/dataset"], ["s3://bucket/dataset", "dataset"]),
        ("append", ["true", "false"], ["yes", "True"]),
    ],
)
def test_metadata_refuses_what_a_launcher_would(
    name: str, good: list[str], bad: list[str], repository: Path
) -> None:
    regexes = parameters(repository)[name]["regexes"]
    assert isinstance(regexes, list)
    for value in [*good, *bad]:
        assert all(re.search(regex, value) for regex in regexes) == (value in good), value


@pytest.mark.slow
def test_launcher_says_what_is_wrong_in_one_line(repository: Path, tmp_path: Path) -> None:
    template = repository / "deploy" / "dataflow" / "template.py"
    words = [f"--job={tmp_path}/no.yaml", f"--input={tmp_path}", f"--output={tmp_path}/dataset"]
    done = subprocess.run(
        [sys.executable, template, *words],
        env=os.environ | {"PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert re.fullmatch(r"error: .*no\.yaml; check the path", done.stderr.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_graph_that_the_launcher_sends_builds_the_bytes_of_the_command(
    repository: Path, tmp_path: Path
) -> None:
    """Beam's own Dataflow client makes and stages it; log and dataset are at `gs://`.

    Launcher and workers have our wheel, as in their image. The workers see no file of the launcher,
    and retry and duplicate their bundles.
    """
    python = install_wheel(repository, repository / "requirements-dataflow.lock") / "python"
    launcher, dataset = tmp_path / "launcher", f"gs://{BUCKET}/dataset"
    job = write_input(launcher)
    shutil.copytree(launcher / "log", tmp_path / "buckets" / BUCKET / "log")
    options = repository / "deploy" / "dataflow" / "options.txt"
    words = [
        f"--job={job}",
        f"--input=gs://{BUCKET}/log",
        f"--output={dataset}",
        f"--template_location={tmp_path / 'job.json'}",  # as Google's launcher adds
        *options.read_text().split(),
    ]
    with gcs_server(tmp_path, tmp_path / "buckets") as endpoint:
        variables = google_environment(endpoint, tmp_path) | without_sources(tmp_path / "path")
        run(
            repository,
            variables,
            python,
            repository / "deploy" / "dataflow" / "template.py",
            *words,
        )
        objects = f"{endpoint}/storage/v1/b/{BUCKET}/o"
        names = [item["name"] for item in json.loads(fetch(objects))["items"]]
        (staged,) = [name for name in names if name.endswith("/pipeline.pb")]
        (tmp_path / "pipeline.pb").write_bytes(fetch(f"{objects}/{quote(staged, '')}?alt=media"))
        sent = json.loads((tmp_path / "job.json").read_text())
        image = next(o for o in options.read_text().split() if o.startswith("--sdk_container_im"))
        (pool,) = sent["environment"]["workerPools"]
        assert pool["workerHarnessContainerImage"] == image.partition("=")[2]
        assert [name for name in names if name.startswith("dataset/")] == []
        log = tmp_path / "pool.log"
        with fault_proxy(endpoint, Faults(), gcs_api.forward) as store:
            variables |= {"STORAGE_EMULATOR_HOST": store}
            with worker_pool(launcher, log, python, variables, repeat=True) as address:
                run(repository, variables, python, "-c", RUN, tmp_path / "pipeline.pb", address)
            run(
                repository,
                variables | {"PYTHONPATH": str(repository)},
                *(sys.executable, "-c", COPY, dataset, tmp_path / "built"),
            )
    repeated = {line.split()[1] for line in log.read_text().splitlines() if "repeated " in line}
    assert repeated == {name for _, name in (*DO_FNS[:2], *FUNCTIONS)}
    build = ["build", job, "--input", launcher / "log", "--output", tmp_path / "by-command"]
    run(repository, {}, sys.executable, "-m", "pipelines", *build)
    # A bundle that ran twice leaves the fitted files of its other attempt, which no segment names.
    fitted = fitted_files(Location.parse(tmp_path / "built"))
    built = without_paths(bytes_of(tmp_path / "built"))
    built = {n: b for n, b in built.items() if n in fitted or not n.startswith(FITTED)}
    expected = without_paths(bytes_of(tmp_path / "by-command"))
    if built.keys() != expected.keys():  # the attempt whose files have a random end was committed
        built, expected = without_fitted_names(built), without_fitted_names(expected)
    assert built == expected


def without_fitted_names(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a dataset without the names of fitted files, and without hashes of what has them."""
    renamed: dict[str, bytes] = {}
    for name, data in files.items():
        if name.startswith(FITTED):
            renamed[re.sub(r"-[0-9a-f]{6}(?=\.\w+$)", "", name)] = data
        elif name.endswith("MANIFEST.json"):
            hidden = {"checksum", "fitted", "segment_sha256"}
            fields = {k: v for k, v in json.loads(data).items() if k not in hidden}
            renamed[name] = json.dumps(fields).encode()
        elif name != MANIFESTS:
            renamed[name] = data
    return renamed


def google_environment(endpoint: str, folder: Path) -> dict[str, str]:
    """Return the variables by which Google's clients find an emulator, and look for no service.

    The credentials are those of a user whose token nobody checks, and nobody renews before 2099.
    """
    keys = dict.fromkeys(("client_id", "client_secret", "refresh_token", "token"), "nobody")
    user = {"type": "authorized_user", **keys, "expiry": "2099-01-01T00:00:00Z"}
    (folder / "credentials.json").write_text(json.dumps(user))
    return {
        "STORAGE_EMULATOR_HOST": endpoint,
        "GOOGLE_APPLICATION_CREDENTIALS": str(folder / "credentials.json"),
        "NO_GCE_CHECK": "true",
    }


def fetch(url: str) -> bytes:
    with urlopen(url) as reply:
        return reply.read()


def run(repository: Path, variables: Mapping[str, str], *words: str | Path) -> None:
    done = subprocess.run(
        [str(word) for word in words],
        env={**os.environ, "PYTHONPATH": str(repository), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
