"""The page in a real browser: `make dashboard-test` installs what it takes."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster import cluster_of

from chaosnet import client
from chaosnet.page.feed import Feed, of_cluster, of_status
from chaosnet.page.picture import Picture
from chaosnet.page.server import PageServer

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from many_nodes import cluster as simulated

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="no playwright here (make dashboard-test installs it)"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.realtime,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here (make dashboard-test installs it)"),
]

PATIENCE_MS = 20_000
NODE = "#graph .node[aria-label^='{}']"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def page_at(browser: Any, url: str, **how: Any) -> Iterator[Any]:
    """A page that has nothing to complain of."""
    context = browser.new_context(**how)
    page, complaints = context.new_page(), []
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    yield page
    context.close()
    assert not complaints


@contextmanager
def served(feed: Feed) -> Iterator[str]:
    server = PageServer(feed, "127.0.0.1", 0, "--listen")
    server.start()
    yield server.url()
    server.stop()


def seen(page: Any, node: str, words: str = "") -> Any:
    return page.wait_for_selector(NODE.format(f"{node}, {words}" if words else f"{node},"))


def test_nodes_a_join_and_a_death_are_seen_on_the_page(browser, tmp_path):
    with cluster_of(2, tmp_path, pause_s=0.02) as cluster:
        address = cluster.nodes[0].last("joined")["address"]
        with served(of_cluster(lambda: address)) as url, page_at(browser, url) as page:
            seen(page, "a", "scheduler"), seen(page, "b", "member")
            page.wait_for_selector("#chart .smooth")
            cluster.start().last("joined")
            seen(page, "c", "member")
            cluster.nodes[1].kill()
            seen(page, "b", "lost")
            page.wait_for_selector("#events li.bad:has-text('b is lost')")
            title, until_s = page.title(), time.monotonic() + PATIENCE_MS / 1e3
            while page.title() == title:
                assert time.monotonic() < until_s, "the others go on"
                page.wait_for_timeout(100)


def test_a_node_is_had_leave_from_the_page_by_who_has_the_token_and_by_nobody_else(browser, tmp_path):
    with cluster_of(2, tmp_path, pause_s=0.02) as cluster:
        address = cluster.nodes[0].last("joined")["address"]
        server = PageServer(of_cluster(lambda: address), "127.0.0.1", 0, "--listen", with_actions=True)
        server.start()
        with page_at(browser, server.url()) as page:
            seen(page, "b", "member")
            assert not page.locator("#change").is_visible()
            assert "token is missing" in page.locator("#rights").inner_text()
        with page_at(browser, server.url_with_token) as page:
            seen(page, "b", "member")
            page.on("dialog", lambda dialog: dialog.accept())
            page.locator("#leaving select").select_option("b")
            page.locator("#leaving button").click()
            page.wait_for_selector("#answer:has-text('b')")
            assert cluster.nodes[1].exit_code() == 0
            seen(page, "b", "left")
        server.stop()


def test_a_page_whose_server_falls_silent_does_not_say_that_it_is_live(browser, tmp_path):
    """As after a cut of power there: connections stay open, and nothing comes."""
    with cluster_of(1, tmp_path, pause_s=0.02) as cluster:
        address = cluster.nodes[0].last("joined")["address"]
        command = [sys.executable, "-m", "chaosnet", "dashboard", address, "--listen", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = next(word for word in server.stdout.readline().split() if word.startswith("http://"))
            with page_at(browser, url) as page:
                page.wait_for_selector("#live.good:has-text('live')")
                server.send_signal(signal.SIGSTOP)
                page.wait_for_selector("#live.bad:has-text('server gone')")
                assert "does not answer since" in page.locator("#notices").inner_text()
                server.send_signal(signal.SIGCONT)
                page.wait_for_selector("#live.good:has-text('live')")
            server.send_signal(signal.SIGINT)


def test_an_open_page_moves_from_a_node_that_dies_to_one_that_serves_another(browser, tmp_path):
    with cluster_of(3, tmp_path, pause_s=0.02) as cluster, ThreadPoolExecutor() as threads:
        pages: dict[str, str] = {}
        for _ in range(2):
            cluster.start(env={"CHAOSNET_DASHBOARD": "0"}).last("joined")
        address = cluster.nodes[0].last("joined")["address"]

        def both() -> bool:
            asked = threads.submit(client.status, address)  # This thread's loop is the browser's.
            pages.update({row.node: row.page for row in asked.result().members if row.page})
            return len(pages) == 2

        cluster.until(both, "d and e tell of their pages")
        context = browser.new_context()
        page = context.new_page()
        page.goto(pages["d"])
        page.wait_for_selector(NODE.format("e,"), timeout=PATIENCE_MS)
        page.wait_for_timeout(1500)  # It has heard where the others serve.
        cluster.nodes[3].kill()
        page.wait_for_url(f"{pages['e']}/", timeout=PATIENCE_MS)
        page.wait_for_selector(NODE.format("e,"), timeout=PATIENCE_MS)
        cluster.nodes[4].kill()
        page.wait_for_selector("text=chaosnet dashboard 127.0.0.1:", timeout=PATIENCE_MS)
        context.close()


def test_two_hundred_nodes_are_drawn_within_a_second_and_read_by_keyboard(browser):
    feed = of_status(simulated(200), "run.json")
    with served(feed) as url, page_at(browser, url) as page:
        page.wait_for_selector("#graph .node")
        assert page.locator("#graph .node").count() == 201
        assert page.evaluate("chaosnetDrawMs") < 1000
        page.locator("#graph .node").first.focus()
        page.keyboard.press("ArrowRight")
        assert page.locator("#details b").inner_text() == "n1"
        page.locator("#chart").focus()
        page.keyboard.press("ArrowLeft")
        assert "step" in page.locator("#reading").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_it_fits_a_phone_and_a_desk_and_can_be_read_in_both_schemes(browser, width, scheme):
    status = simulated(8, pipelines="n0 0-3 > n1 4-7 x8 | n2 0-7 x4")
    how = {"viewport": {"width": width, "height": 844}, "color_scheme": scheme}
    with served(of_status(status, "run.json")) as url, page_at(browser, url, **how) as page:
        page.wait_for_selector(".pipe .stage")
        assert page.evaluate("document.documentElement.scrollWidth") == width, "nothing sticks out"
        faint = page.evaluate(FAINT)
        assert not faint, "text has a contrast of 4.5 or more (WCAG AA)"


FAINT = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  const found = [];
  for (const e of document.querySelectorAll("header *, main *, footer *, #notices *")) {
    if (e.closest("#graph") || !e.checkVisibility() || ![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    const style = getComputedStyle(e), a = light(parse(e.closest("svg") ? style.fill : style.color)), b = light(ground(e));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found.push(`${e.tagName}.${e.className?.baseVal ?? e.className} ${e.textContent.slice(0, 20)}: ${contrast.toFixed(2)}`);
  }
  return found;
}"""  # noqa: E501


def test_a_cluster_that_falls_silent_is_told_of_and_what_was_known_stays(browser):
    def ask(on_silence: Any) -> Iterator[Any]:
        yield simulated(3, joining=False, began_s=time.time() - 60)
        while True:
            on_silence(client.PeerUnreachable("10.0.0.1:5555: nobody answers"))
            time.sleep(0.2)

    with served(Feed(Picture(), ask)) as url, page_at(browser, url) as page:
        page.wait_for_selector("text=The cluster does not answer since")
        assert page.locator("#graph .node").count() == 3
