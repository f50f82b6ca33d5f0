"""The page in a real browser: `make dashboard-test` installs what it takes."""

from __future__ import annotations

import itertools
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster import cluster_of

from chaosnet import client
from chaosnet.page.feed import Feed, of_cluster, of_status
from chaosnet.page.picture import Picture
from chaosnet.page.server import PageServer
from chaosnet.protocols.status import CheckpointRow, WaitRow

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
                assert "has not answered since" in page.locator("#notices").inner_text()
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


def test_a_page_stays_with_its_server_after_its_machine_was_asleep(browser):
    """And keeps its actions: another member's page, which answers sooner than the next news come, has none."""

    def serving(status: Any, with_actions: bool) -> PageServer:
        def ask(on_silence: Any) -> Iterator[Any]:
            while True:
                yield status

        server = PageServer(Feed(Picture(), ask), "127.0.0.1", 0, "--listen", with_actions)
        server.start()
        return server

    status = simulated(3, joining=False)
    other = serving(status, with_actions=False)
    members = tuple(msgspec.structs.replace(row, page=other.url()) for row in status.members)
    own = serving(msgspec.structs.replace(status, members=members), with_actions=True)
    context = browser.new_context()
    page = context.new_page()
    page.clock.install()
    page.goto(own.url_with_token)
    page.wait_for_selector("#live.good:has-text('live')")
    page.clock.fast_forward("08:00:00")
    page.wait_for_timeout(3000)
    assert page.url == own.url_with_token
    page.wait_for_selector("#live.good:has-text('live')")
    assert page.locator("#change").is_visible()
    context.close()
    own.stop()
    other.stop()


def with_metrics(status: Any, metrics: Any) -> Any:
    """`metrics`: of a step."""
    steps = tuple(msgspec.structs.replace(row, metrics=metrics(row.step)) for row in status.steps)
    return msgspec.structs.replace(status, steps=steps, metrics=steps[-1].metrics)


def test_a_metric_of_some_steps_only_has_a_curve_whatever_its_name(browser):
    def metrics(step: int) -> dict[str, float | None]:
        return {"loss": 1.0 / step, **({"constructor": 1.0 + step} if step % 10 == 0 else {})}

    with (
        served(of_status(with_metrics(simulated(2), metrics), "run.json")) as url,
        page_at(browser, url) as page,
    ):
        page.locator("#names button", has_text="constructor").click()
        assert page.locator("#chart .smooth").get_attribute("d").count("L") == 39
        page.locator("#chart").focus()
        page.keyboard.press("ArrowLeft")
        assert page.locator("#reading").inner_text().endswith("401.0")
        assert "step 400" in page.locator("#reading").inner_text()


def test_what_a_mark_on_the_curve_stands_for_is_read_with_the_curve(browser):
    with served(of_status(simulated(3), "run.json")) as url, page_at(browser, url) as page:
        page.locator("#chart").scroll_into_view_if_needed()
        mark = page.locator("#chart .event-mark.bad").bounding_box()
        page.mouse.move(mark["x"] + mark["width"] / 2, mark["y"] + 60)
        assert "n-lost is lost: silent for 1.3 s" in page.locator("#reading").inner_text()
        page.mouse.move(mark["x"] + 60, mark["y"] + 60)
        assert "is lost" not in page.locator("#reading").inner_text()


def test_who_leaves_or_can_only_dial_is_not_told_of_as_if_it_were_lost(browser):
    status = simulated(3)
    kinds = ("left", "unreachable")
    told = [msgspec.structs.replace(status.events[0], kind=kind, node=kind, step=300) for kind in kinds]
    status = msgspec.structs.replace(status, events=tuple(told))
    with served(of_status(status, "run.json")) as url, page_at(browser, url) as page:
        page.wait_for_selector("#chart .event-mark")
        assert page.locator("#events li").count() == 2
        assert page.locator("#events .bad").count() == page.locator("#chart .bad").count() == 0


def test_levels_of_a_curve_are_what_they_say_also_where_all_values_are_nearly_equal(browser):
    status = with_metrics(simulated(2), lambda step: {"loss": 0.12345 + 1e-6 * step})
    with served(of_status(status, "run.json")) as url, page_at(browser, url) as page:
        for name in ("loss", "samples a step", "step time"):
            page.locator("#names button", has_text=name).click()
            levels = page.locator("#chart .level").all_text_contents()
            values = [float(text.removesuffix(" s")) for text in levels]
            gaps = [after - before for before, after in itertools.pairwise(values)]
            assert gaps and max(gaps) == pytest.approx(min(gaps)), (name, levels)


def test_a_metric_that_is_never_finite_is_said_to_be_so(browser):
    status = with_metrics(simulated(2), lambda step: {"loss": None})
    with served(of_status(status, "run.json")) as url, page_at(browser, url) as page:
        page.wait_for_selector("#chart text:has-text('finite')")
        assert page.locator(".tile dd").nth(1).inner_text() == "not finite"


def test_times_of_another_day_are_told_with_their_day(browser):
    status = msgspec.structs.replace(
        simulated(2, began_s=1.75e9), checkpoint=CheckpointRow(step=9, time_s=1.75e9)
    )
    with served(of_status(status, "run.json")) as url, page_at(browser, url, timezone_id="UTC") as page:
        page.wait_for_selector("#live:has-text('as of 15 Jun 2025 15:09')")
        assert "15 Jun 2025 15:0" in page.locator("#events time").first.inner_text()
        assert "at 15 Jun 2025 15:06:40" in page.locator("#tiles").inner_text()


LONG = "gpu<img src=x>_of_rack_17_in_the_datacenter_of_frankfurt_am_{:03}"


def named_at_length() -> Any:
    """Eight nodes with names of 64 characters that differ at their ends, after a week; all are waited for."""
    status = simulated(8, pipelines="n0 0-3 > n1 4-7 x8 | n2 0-7 x4")
    names = {row.node: LONG.format(place) for place, row in enumerate(status.members)}

    def renamed(text: str) -> str:
        return " ".join(names.get(word, word) for word in text.split())

    members = tuple(
        msgspec.structs.replace(
            row, node=names[row.node], neighbors=tuple(map(renamed, row.neighbors)), sent_bytes=61_234_000_000_000,
            pulled={renamed(name): count for name, count in row.pulled.items()},
        )
        for row in status.members
    )  # fmt: skip
    links = tuple(
        msgspec.structs.replace(row, a=names[row.a], b=names[row.b], rate_age_s=604_800.0)
        for row in status.links
    )
    return msgspec.structs.replace(
        status, members=members, links=links, scheduler=names["n0"], pipelines=renamed(status.pipelines),
        step=12_345_678, samples_per_s=9_876_543.0, checkpoint=CheckpointRow(step=12_345_000, time_s=0.0),
        waiting=WaitRow(whom=tuple(names.values()), seconds=90_000.0, why="it pulls the state"),
    )  # fmt: skip


@pytest.mark.parametrize("width", [360, 1440])
def test_long_names_and_large_numbers_fit_and_names_can_be_told_apart(browser, width):
    how = {"viewport": {"width": width, "height": 844}}
    with served(of_status(named_at_length(), "run.json")) as url, page_at(browser, url, **how) as page:
        page.wait_for_selector(".pipe .stage")
        page.wait_for_timeout(700)  # Nodes have moved to their places.
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(CUT) == []
        assert (
            page.locator("img[src=x]").count() == 0 and LONG.format(0) in page.locator("#rows").inner_text()
        )
        for where in ("#split-rows .row > span:first-child", "#graph .node .name"):
            shown = page.locator(where).all_text_contents()
            assert len({*shown}) == len(shown) > 7, shown
        notices = page.locator("#notices").inner_text()
        assert "and 7 more" in notices and LONG.format(5) not in notices
        assert "61 TB" in page.locator("#rows").inner_text()
        page.locator("#graph .link").first.dispatch_event("click")
        assert "168 h 0 min ago" in page.locator("#details").inner_text()


CUT = """() => {
  const inside = ({ left, right }) => left >= 0 && right <= innerWidth;
  const cells = [...document.querySelectorAll(".tile dd, .row > span")];
  const cut = cells.filter((e) => e.scrollWidth > e.clientWidth);
  const out = [...document.querySelectorAll("#graph .name")].filter((e) => !inside(e.getBoundingClientRect()));
  return [...cut, ...out].map((e) => e.textContent);
}"""


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


def test_two_hundred_nodes_that_change_every_second_while_some_die_leave_the_browser_time_for_its_frames(
    browser,
):
    """Times of frames and of what is drawn at an update, over eight of them, on whatever else this machine does."""

    def ask(on_silence: Any) -> Iterator[Any]:
        status = simulated(200, began_s=time.time() - 180)
        for turn in itertools.count():
            gone = {f"n{place}" for place in range(9, 9 + turn)}
            rows = [
                msgspec.structs.replace(
                    row, step=row.step + turn, sync_delay_s=row.sync_delay_s * (1 + turn % 3), cpu_pct=90.0 + turn,
                    state="failed" if row.node in gone else row.state,
                )
                for row in status.members
            ]  # fmt: skip
            links = [
                msgspec.structs.replace(link, rate_mbit=link.rate_mbit * (1 + 0.1 * (turn % 3)))
                for link in status.links
                if not gone & {link.a, link.b}
            ]
            step = status.step + turn
            yield msgspec.structs.replace(status, step=step, members=tuple(rows), links=tuple(links))

    with served(Feed(Picture(), ask)) as url, page_at(browser, url) as page:
        page.wait_for_selector("#graph .node")
        frames, draws = page.evaluate(FRAMES, 8)
    told = f"ms between frames {sorted(frames)}, ms of draws {sorted(draws)}"
    assert statistics.median(frames) < 50, told
    assert statistics.median(draws) < 150, told


FRAMES = """(wanted) => new Promise((done) => {
  const frames = [], draws = [];
  let last = performance.now(), drawn = chaosnetDrawMs;
  const frame = () => {
    const now = performance.now();
    frames.push(Math.round(now - last));
    last = now;
    if (chaosnetDrawMs !== drawn) draws.push(Math.round(drawn = chaosnetDrawMs));
    if (draws.length < wanted) requestAnimationFrame(frame);
    else done([frames, draws]);
  };
  requestAnimationFrame(frame);
})"""


def test_events_lie_at_equal_distances_whatever_their_kinds(browser):
    status = simulated(3)
    asked = [msgspec.structs.replace(status.events[-1], node=f"m{number}") for number in range(3)]
    status = msgspec.structs.replace(status, events=(*status.events, *asked))
    with served(of_status(status, "run.json")) as url, page_at(browser, url) as page:
        page.wait_for_selector("#events li:has-text('m2')")
        tops = page.evaluate("""[...document.querySelectorAll("#events li")]
            .map((each) => each.querySelector(".what").getBoundingClientRect().top
                - each.getBoundingClientRect().top + parseFloat(getComputedStyle(each).marginTop))""")
        assert len(tops) > 5 and max(tops) - min(tops) < 1, tops


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440])
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
        page.wait_for_selector("text=The cluster has not answered since")
        assert page.locator("#graph .node").count() == 3
