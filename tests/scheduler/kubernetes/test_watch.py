"""The list and its watch after a resource version has expired."""

import time
from pathlib import Path

import pytest

from presage.scheduler.drivers.kubernetes.api_server import (
    GONE,
    Api,
    ApiRefusedError,
    Listed,
    PodChange,
    Watch,
    WatchEvent,
    connect,
)
from tests.cluster.servers import Cluster
from tests.scheduler.kubernetes.pods import config_of

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(180)]
SELECTOR = "app=followed"


class Late:
    """An API whose first list is of long ago, as that of a scheduler which was held since."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.lists = 0
        self.watch = api.watch
        self.interrupt = api.interrupt

    def list(self, selector: str) -> tuple[list, str]:
        self.lists += 1
        pods, version = self._api.list(selector)
        return pods, "1" if self.lists == 1 else version


def until(watch: Watch, kind: type[WatchEvent]) -> WatchEvent:
    """Return the first news of a kind; pytest's timeout ends the wait."""
    while True:
        for news in watch.take():
            if isinstance(news, kind):
                return news
        time.sleep(0.05)


def test_a_watch_from_a_version_that_is_forgotten_lists_again(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    config = config_of(cluster, namespace, tmp_path)
    cluster.restart_api_server()  # what it remembers begins here
    with pytest.raises(ApiRefusedError) as found:
        list(connect(config).watch(SELECTOR, "1"))
    assert found.value.status == GONE
    late = Late(connect(config))
    watch = Watch(late, SELECTOR)  # pyright: ignore[reportArgumentType] - what it calls is there
    assert watch.start() == ()
    try:
        assert until(watch, Listed) == Listed(())
        container = {"name": "main", "image": "none", "command": ["sleep", "600"]}
        metadata = {"name": "new", "labels": {"app": "followed"}}
        body = {"metadata": metadata, "spec": {"containers": [container]}}
        cluster.core().create_namespaced_pod(namespace, body)
        news = until(watch, PodChange)
        assert isinstance(news, PodChange)
        assert (news.pod["metadata"]["name"], news.gone) == ("new", False)
        assert late.lists == 2
    finally:
        watch.stop()
