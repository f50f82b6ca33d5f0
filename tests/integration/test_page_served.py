"""The page over HTTP, of real clusters: from a node's process, from the command, and as Prometheus scrapes it."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pipeline_worker
import pytest
from cluster import cluster_of
from prometheus_client.parser import text_string_to_metric_families

from chaosnet import client
from chaosnet.page.feed import Feed, of_cluster, of_status
from chaosnet.page.picture import Picture
from chaosnet.page.server import STATIC, PageServer
from chaosnet.protocols.errors import ConfigError
from chaosnet.protocols.status import to_json

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from many_nodes import cluster as simulated

pytestmark = pytest.mark.realtime

PATIENCE_S = 20.0


def get(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


@contextmanager
def news_of(url: str) -> Iterator[Iterator[dict[str, Any]]]:
    """What a browser that looks at the page hears."""
    with urllib.request.urlopen(f"{url}/events", timeout=PATIENCE_S) as stream:
        yield (json.loads(line[6:]) for line in stream if line.startswith(b"data: "))


def first(news: Iterator[dict[str, Any]], true: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    deadline_s = time.monotonic() + PATIENCE_S
    for each in news:
        if each.get("head") and true(each):
            return each
        assert time.monotonic() < deadline_s, each
    raise AssertionError("the page has ended")


def remembered(news: Iterator[dict[str, Any]], told: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for each in news:
        told.append(each)
        yield each


def states(page: dict[str, Any]) -> dict[str, str]:
    return {node["id"]: node["state"] for node in page["nodes"]}


@contextmanager
def served(feed: Feed) -> Iterator[str]:
    server = PageServer(feed, "127.0.0.1", 0, "--listen")
    server.start()
    yield server.url()
    server.stop()


def test_a_node_serves_the_page_from_its_process_until_its_trainer_ends(tmp_path):
    with cluster_of(2, tmp_path, pause_s=0.02) as cluster:
        a, b = cluster.nodes
        c = cluster.start(env={"CHAOSNET_DASHBOARD": "0"}, ballast_bytes=0)
        address = c.last("joined")["address"]
        url = cluster.until(
            lambda: next((row.page for row in client.status(address).members if row.page), ""),
            "c tells of its page",
        )
        with news_of(url) as news:
            told: list[dict[str, Any]] = []
            page = first(remembered(news, told), lambda page: len(page["nodes"]) == 3 and page["split"])
            assert states(page) == {"a": "active", "b": "active", "c": "active"}
            assert {(link["a"], link["b"]) for link in page["links"]} <= {("a", "b"), ("a", "c"), ("b", "c")}
            assert any(link["share"] for link in page["links"]), "trees lead over links"
            first(remembered(news, told), lambda page: page.get("curves"))
            steps = [step for page in told for step in page.get("curves", {"step": []})["step"]]
            assert steps == [*range(steps[0], steps[0] + len(steps))], "increments continue the history"
            b.kill()
            first(remembered(news, told), lambda page: states(page)["b"] == "failed")
            assert any(each["node"] == "b" for page in told for each in page.get("events", ()))
        assert "chaosnet_up 1.0" in get(f"{url}/metrics")
        assert get(f"{url}/health") == f"chaosnet {client.status(address).cluster}\n"
        a.advance(5)
        cluster.leave()
        with pytest.raises(urllib.error.URLError):
            get(f"{url}/health")


@pytest.mark.slow
def test_the_command_shows_a_cluster_goes_on_with_survivors_and_ends_with_ctrl_c(tmp_path):
    with cluster_of(3, tmp_path, pause_s=0.02) as cluster:
        a, b, _ = cluster.nodes
        address = b.last("joined")["address"]
        command = [sys.executable, "-m", "chaosnet", "dashboard", address, "--listen", "127.0.0.1:0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                assert line.startswith(f"the cluster of {address}: http://127.0.0.1:"), line
                url = line.split()[4]
                with news_of(url) as news:
                    page = first(news, lambda page: len(page["nodes"]) == 3)
                    b.kill()
                    later = first(news, lambda page: states(page)["b"] == "failed")
                    assert later["head"]["step"] > page["head"]["step"]
                assert json.loads(get(f"{url}/status.json"))["cluster"] == page["head"]["cluster"]
                assert [*text_string_to_metric_families(get(f"{url}/metrics"))]
                process.send_signal(signal.SIGINT)
                assert (process.wait(PATIENCE_S), process.stderr.read() if process.stderr else "") == (0, "")
            finally:
                process.kill()
        a.advance(5)


def test_pipelines_whose_members_keep_parts_are_shown_with_who_keeps_what_also_after_a_death(tmp_path):
    with cluster_of(3, tmp_path, script=pipeline_worker.train, keepers=2) as cluster:
        address = cluster.nodes[0].last("joined")["address"]
        with served(of_cluster(lambda: address)) as url, news_of(url) as news:
            page = first(news, lambda page: page["kept"] and len(page["kept"]["rows"]) == 3)
            layers = 1 + max(stage["last"] for line in page["pipelines"] for stage in line["stages"])
            assert (page["kept"]["layers"], page["kept"]["keepers"]) == (layers, 2)
            killed = cluster.nodes[2].kill()
            cluster.without("c", killed)
            page = first(news, lambda page: page["kept"] and len(page["kept"]["rows"]) == 2)
            assert {row["node"] for row in page["kept"]["rows"]} == {"a", "b"}
            assert {tuple(map(tuple, row["ranges"])) for row in page["kept"]["rows"]} == {((0, layers - 1),)}


def test_a_cluster_that_cannot_be_reached_is_told_of_and_shown_once_it_is_there(tmp_path):
    status, there = simulated(2, joining=False), [False]

    def ask(on_silence: Any) -> Iterator[Any]:
        if not there[0]:
            raise client.PeerUnreachable("nobody answers")
        while True:
            yield status

    with served(Feed(Picture(), ask)) as url, news_of(url) as news:
        assert next(each for each in news if each["trouble"])["trouble"] == "nobody answers"
        assert "chaosnet_up 0.0" in get(f"{url}/metrics")
        there[0] = True
        assert len(first(news, lambda page: True)["nodes"]) == 3


def test_a_finished_run_is_shown_from_its_file(tmp_path):
    (tmp_path / "run.json").write_bytes(to_json(simulated(8, joining=False)))
    command = [sys.executable, "-m", "chaosnet", "dashboard", "--file", "run.json", "--listen", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[1]
        with news_of(url) as news:
            page = first(news, lambda page: True)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    assert (page["source"], len(page["curves"]["step"]), page["silent_for_s"]) == ("run.json", 400, None)


def test_the_page_is_for_this_machine_only_and_needs_nothing_from_elsewhere():
    with served(of_status(simulated(2), "run.json")) as url:
        with pytest.raises(urllib.error.HTTPError, match="400"):
            get(url, Host="evil.example")  # A name of somebody else's that leads here.
        page = get(url)
        assert "//" not in page.replace("<!doctype", ""), "all that it loads comes from here"
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        connection.request("POST", "/status.json")
        assert connection.getresponse().status == 405
        for name in sorted(each.name for each in STATIC.iterdir()):
            text = get(f"{url}/static/{name}")
            assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text, name


def test_a_browser_asks_anew_for_each_file_of_the_page_and_is_told_what_it_has_already():
    """Else, after an update of chaosnet, it would mix new files with old ones."""
    with served(of_status(simulated(2), "run.json")) as url:
        for path in ("/", "/static/page.js", "/static/page.css"):
            with urllib.request.urlopen(url + path, timeout=PATIENCE_S) as answer:
                assert (answer.headers["Cache-Control"], bool(answer.headers["ETag"])) == ("no-cache", True)
                known = {"If-None-Match": answer.headers["ETag"]}
            if path != "/":
                with pytest.raises(urllib.error.HTTPError, match="304"):
                    get(url + path, **known)


def test_a_port_that_is_taken_is_named():
    with served(of_status(simulated(2), "run.json")) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"dashboard: '127.0.0.1:{port}': .*\(expected a free port"):
            PageServer(of_status(simulated(2), ""), "127.0.0.1", port, "dashboard")


@pytest.mark.skipif(
    not shutil.which("prometheus"), reason="there is no prometheus here (Debian: apt install prometheus)"
)
def test_a_real_prometheus_scrapes_it(tmp_path):
    with served(of_status(simulated(8), "run.json")) as url:
        if shutil.which("promtool"):
            checked = subprocess.run(
                ["promtool", "check", "metrics"],
                input=get(f"{url}/metrics"),
                text=True,
                capture_output=True,
                check=False,
            )
            # A link's rate is told in bits a second, as everybody says it, and not in the base unit.
            found = [line for line in checked.stderr.splitlines() if "link_rate_bits_per_second" not in line]
            assert checked.returncode in (0, 3) and not found
        target = url.removeprefix("http://")
        job = f"job_name: chaosnet, scrape_interval: 1s, static_configs: [{{targets: ['{target}']}}]"
        (tmp_path / "prometheus.yml").write_text(f"scrape_configs: [{{{job}}}]")
        port = free_port()
        command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
                   f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            query = f"http://127.0.0.1:{port}/api/v1/query?query=count(chaosnet_link_rate_bits_per_second)"
            deadline_s = time.monotonic() + PATIENCE_S
            while not (found := asked(query)):
                assert time.monotonic() < deadline_s, (tmp_path / "log").read_text()
                time.sleep(0.2)
            assert int(found[0]["value"][1]) == 2 * len(simulated(8).links)
        finally:
            process.kill()
            process.wait()


def asked(query: str) -> list[dict[str, Any]]:
    try:
        return list(json.loads(get(query))["data"]["result"])
    except (OSError, urllib.error.URLError):
        return []


def free_port() -> int:
    import socket

    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])
