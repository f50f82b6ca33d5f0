"""`chaosnet.netem`: topologies, traces, and the commands that make testbeds, as text."""

from types import SimpleNamespace

import networkx as nx
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from chaosnet.commands import testbed
from chaosnet.commands.testbed import testbed as command_line
from chaosnet.netem import LinkSpec, TestbedError, Topology, Trace, commands
from chaosnet.netem.netns import in_force
from chaosnet.netem.topology import burst_bytes, line, mesh, random_overlay, ring, star, two_sites
from chaosnet.netem.trace import specs_after
from chaosnet.protocols.errors import ConfigError

PAIR = Topology({("b", "a"): LinkSpec(rate_mbit=200.0, rate_back_mbit=50.0)}, ["a", "b"])


def text(made):
    return [" ".join(command) for command in made]


# --- topologies ---


def test_a_link_is_named_in_order_and_keeps_its_directions():
    assert PAIR.links == {("a", "b"): LinkSpec(rate_mbit=50.0, rate_back_mbit=200.0)}
    assert PAIR.spec(("b", "a")).rate_from(first=True) == 50.0


@pytest.mark.parametrize("make", [ring, line, star, mesh, two_sites])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_generated_overlays_are_connected_and_survive_a_file(make, count):
    topology = make(count)
    assert nx.is_connected(topology.graph)
    again = Topology.from_text(topology.to_text())
    assert (again.nodes, again.links) == (topology.nodes, topology.links)


@given(st.integers(2, 14), st.integers(0, 2**20))
def test_random_overlays_are_connected_even_and_of_the_papers_rates(count, seed):
    topology = random_overlay(count, seed)
    assert nx.is_connected(topology.graph)
    assert topology.links == random_overlay(count, seed).links
    assert all(100 <= spec.rate_mbit <= 1000 for spec in topology.links.values())
    degrees = [degree for _, degree in topology.graph.degree]
    assert max(degrees) <= 4
    assert len(topology.links) == min(count * (count - 1) // 2, max(count - 1, round(1.5 * count)))


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        ("links: [{a: x, b: y, rate: 5}]", "unknown field `rate`"),
        ("links: [{a: x, b: y, rate_mbit: 0}]", "links, entry 1: rate_mbit: 0 (expected `float` >= 0.001"),
        ("links: [{a: x, b: y, loss_pct: 101}]", "links, entry 1: loss_pct: 101 (expected `float` <= 100"),
        ("links: [{a: x, b: y}, {a: y, b: x}]", "the link y - x is there twice"),
        ("links: [{a: x, b: x}]", "the link x - x leads nowhere"),
        ("links: [{a: 'x y', b: z}]", "links, entry 1: a: 'x y' (expected `str` matching"),
        ("links: []", "links: [] (expected `array` of length >= 1)"),
        ("links: [{a: x, b: y, rate_mbit: 1.0e-12}]", "rate_mbit: 1e-12 (expected `float` >= 0.001"),
        ('links: [{a: "x\\n", b: z}]', "links, entry 1: a: 'x\\n' (expected `str` matching"),
        ("links: {", "not YAML"),
        ("links: [{a: 2026-13-01, b: z}]", "not YAML (month must be in 1..12)"),
        ("[" * 3000, "not YAML (maximum recursion depth exceeded"),
        ("3", "Expected `object`"),
    ],
)
def test_a_topology_that_cannot_be_is_refused_by_name(told, complaint):
    with pytest.raises(TestbedError) as refused:
        Topology.from_text(told, "mine.yaml")
    assert complaint in str(refused.value)


def test_an_unknown_link_is_told_with_those_there_are():
    with pytest.raises(TestbedError, match=r"no link a - z \(links: a - b\)"):
        PAIR.spec(("a", "z"))


def test_more_links_than_there_are_addresses_for_are_refused_with_how_many_fit():
    commands.check_size(mesh(180))
    with pytest.raises(
        TestbedError, match=r"17766 links \(expected at most 16336: 10.211.0.0/16 has no more"
    ):
        commands.up("t", mesh(189), routes=False, netem=False)


@pytest.mark.parametrize("seconds", ["nan", "-1", "0", "inf"])
def test_a_link_is_not_measured_for_no_time_or_for_ever(seconds):
    done = CliRunner().invoke(command_line, ["measure", "--name", "absent", "--seconds", seconds])
    assert done.exit_code == 2 and "is out of range (expected a number from 0.05 to 3600.0)" in done.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("random 8 --rate 5", "5 means nothing with random (expected no --rate)"),
        ("random 8 --delay 0", "0 means nothing with random (expected no --delay)"),
        ("ring 8 --links 9", "9 means nothing with ring (expected no --links)"),
        ("two-sites 8 --seed 0", "0 means nothing with two-sites (expected no --seed)"),
    ],
)
def test_options_of_other_shapes_are_refused(words, told):
    done = CliRunner().invoke(command_line, ["new", *words.split()])
    assert done.exit_code == 2 and told in done.output


def test_rate_and_delay_are_those_of_all_links_but_the_two_between_sites():
    def links(words):
        done = CliRunner().invoke(command_line, ["new", *words.split()])
        return Topology.from_text(done.output).links

    assert links("ring 4") == ring(4).links
    assert {*links("ring 4 --rate 5 --delay 2").values()} == {LinkSpec(rate_mbit=5.0, delay_ms=2.0)}
    assert {spec.rate_mbit for spec in links("two-sites 4 --rate 5").values()} == {5.0, 100.0}
    assert links("random 8 --seed 3 --links 10") == random_overlay(8, 3, 10).links


def test_a_seed_gives_the_overlay_that_it_always_gave():
    made = random_overlay(6, seed=1)
    assert {a + b: spec.rate_mbit for (a, b), spec in made.links.items()} == {
        "n0n2": 451, "n0n4": 647, "n0n5": 790, "n1n2": 726, "n1n3": 340, "n1n4": 822, "n2n4": 632, "n3n5": 192,
        "n4n5": 386,
    }  # fmt: skip


@pytest.mark.parametrize("backend", [testbed.DRY_RUN, "netns", "relay"])
def test_a_name_that_no_namespace_can_have_is_refused_by_all_back_ends(tmp_path, backend):
    (tmp_path / "pair.yaml").write_text(PAIR.to_text())
    with pytest.raises(ConfigError, match=r"'../x' is no name of a testbed"):
        command_line.main(
            ["up", str(tmp_path / "pair.yaml"), "--backend", backend, "--name", "../x"], standalone_mode=False
        )


# --- traces ---


def test_a_trace_that_a_spreadsheet_has_written_is_read(tmp_path):
    text = "time_s,a,b,field,value\r\n1,a,b,cut,1\r\n"
    (tmp_path / "t.csv").write_text(text, encoding="utf-8-sig", newline="")
    assert Trace.read(tmp_path / "t.csv", PAIR) == Trace.from_text(text, PAIR)


def test_the_papers_trace_gives_every_link_another_rate_every_three_minutes():
    topology = random_overlay(6, seed=1)
    trace = Trace.random_rates(topology, seed=2, until_s=600.0)
    assert [(time_s, len(changes)) for time_s, changes in trace.moments()] == [
        (180.0, len(topology.links)),
        (360.0, len(topology.links)),
        (540.0, len(topology.links)),
    ]
    assert Trace.from_text(trace.to_text(), topology) == trace


def test_changes_of_one_link_at_one_moment_add_up():
    trace = Trace.from_text(
        "time_s,a,b,field,value\n5,a,b,rate_mbit,10\n5,a,b,delay_ms,3\n5,a,b,cut,1\n", PAIR
    )
    [(_, changes)] = trace.moments()
    assert specs_after(PAIR, changes) == {
        ("a", "b"): LinkSpec(rate_mbit=10.0, rate_back_mbit=200.0, delay_ms=3.0)
    }


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("1,a,b,rate_mbit", "4 columns"),
        ("soon,a,b,rate_mbit,5", "time_s='soon'"),
        ("-1,a,b,rate_mbit,5", "time_s is -1"),
        ("1,a,c,rate_mbit,5", "no link a - c"),
        ("1,a,b,speed,5", "'speed' is no field of a link"),
        ("1,a,b,rate_mbit,-5", "rate_mbit=-5"),
        ("1,a,b,cut,2", "cut=2"),
        ("1,b,a,rate_mbit,5", "name this one a,b"),
        ("1,b,a,rate_back_mbit,5", "name this one a,b"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_by_its_line(row, complaint):
    with pytest.raises(TestbedError) as refused:
        Trace.from_text(f"time_s,a,b,field,value\n\n{row}\n", PAIR, "t.csv")
    assert str(refused.value).startswith("t.csv: line 3: ")
    assert complaint in str(refused.value)


def test_a_trace_that_is_no_csv_is_refused():
    with pytest.raises(TestbedError, match=r"t.csv: not CSV \(field larger than field limit"):
        Trace.from_text(f"time_s,a,b,field,value\n1,a,b,{'x' * 200_000},5\n", PAIR, "t.csv")


# --- commands ---


def test_a_testbed_of_two_nodes_takes_these_commands():
    a, b = (commands.device("t", ("a", "b"), end) for end in "ab")
    loose = "net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0"
    forwarding = f"sysctl -qw net.ipv4.ip_forward=1 {loose}"  # Ways there and back may differ.
    assert text(commands.up("t", PAIR, routes=True, netem=False)) == [
        "ip netns add chaos-t-a",
        "ip netns add chaos-t-b",
        f"ip netns exec chaos-t-a {forwarding}",
        f"ip netns exec chaos-t-b {forwarding}",
        f"ip link add {a} netns chaos-t-a type veth peer name {b} netns chaos-t-b",
        "ip -n chaos-t-a link set lo up",
        "ip -n chaos-t-a address add 10.211.255.254/32 dev lo",
        f"ip -n chaos-t-a address add 10.211.0.1/30 dev {a}",
        f"ip -n chaos-t-a link set {a} up",
        "ip -n chaos-t-a route add 10.211.255.253/32 via 10.211.0.2 src 10.211.255.254",
        "ip -n chaos-t-b link set lo up",
        "ip -n chaos-t-b address add 10.211.255.253/32 dev lo",
        f"ip -n chaos-t-b address add 10.211.0.2/30 dev {b}",
        f"ip -n chaos-t-b link set {b} up",
        "ip -n chaos-t-b route add 10.211.255.254/32 via 10.211.0.1 src 10.211.255.253",
        f"tc -n chaos-t-a qdisc replace dev {a} root handle f4: tbf rate 50mbit burst 62464 latency 20ms",
        f"tc -n chaos-t-b qdisc replace dev {b} root handle 1: tbf rate 200mbit burst 131072 latency 20ms",
    ]


def test_netem_comes_before_the_bucket():
    spec = LinkSpec(rate_mbit=100.0, delay_ms=20.0, jitter_ms=2.5, loss_pct=0.1)
    device = commands.device("t", ("a", "b"), "a")
    assert text(commands.shape("t", {("a", "b"): spec}, netem=True))[:2] == [
        f"tc -n chaos-t-a qdisc replace dev {device} root handle 2: netem limit 100000 rate 1000gbit "
        "delay 20ms 2.5ms distribution normal loss 0.1%",
        f"tc -n chaos-t-a qdisc replace dev {device} parent 2:1 handle 1e8: "
        "tbf rate 100mbit burst 124928 latency 40ms",
    ]


@pytest.mark.parametrize(("delay_ms", "queue_ms"), [(0.0, 20.0), (5.0, 20.0), (50.0, 100.0), (1000.0, 200.0)])
def test_the_bucket_has_a_queue_of_a_round_trip_within_limits(delay_ms, queue_ms):
    assert commands.queue_ms(LinkSpec(delay_ms=delay_ms)) == queue_ms


def test_what_may_stand_at_the_root_has_a_handle_of_its_own():
    link, spec = ("a", "b"), LinkSpec(delay_ms=5.0)
    made = [
        *commands.shape("t", {link: spec}, netem=False),
        *commands.shape("t", {link: spec}, netem=True),
        *commands.cut("t", link),
    ]
    kinds = {(each[each.index("handle") + 1], "root" in each) for each in made}
    assert kinds == {("1:", True), ("2:", True), ("3:", False), ("4:", True)}


def test_a_bucket_that_gets_smaller_is_made_anew():
    """A packet in the old one may be larger than the new one, and would wait for ever."""
    rates = [100_000, 500, 200, 100, 50, 20, 1]
    roots = [commands.shape_end("d", LinkSpec(rate_mbit=rate), True, False)[0] for rate in rates]
    handles = [each[each.index("handle") + 1] for each in roots]
    found = list(zip(map(burst_bytes, rates), handles, strict=True))
    large = {handle for burst, handle in found if burst > 65_536 + 256}  # Larger than any packet.
    small = [handle for burst, handle in found if burst <= 65_536 + 256]
    assert len({*small}) == len(small) and not large & {*small}


def test_routes_to_far_nodes_are_left_out_on_request():
    def routes(far):
        return [each for each in text(commands.up("t", line(3), far, netem=False)) if " route " in each]

    assert (len(routes(True)), len(routes(False))) == (6, 4)


def test_devices_fit_into_what_the_kernel_allows_and_differ():
    made = {
        commands.device(testbed, link, end)
        for testbed in ("a", "b" * 20)
        for link in mesh(12).links
        for end in link
    }
    assert len(made) == 2 * 66 * 2
    assert max(map(len, made)) <= 15


def test_a_bucket_holds_two_milliseconds_or_what_costs_little_cpu():
    assert burst_bytes(200) == 128 << 10
    assert burst_bytes(10_000) == 2_500_000


def test_no_burst_of_a_slow_link_is_longer_than_ten_milliseconds_or_what_tcp_begins_with():
    assert burst_bytes(50) == 62_464
    assert burst_bytes(1) == 16 << 10


def test_commands_for_one_namespace_go_in_one_batch():
    first, second = ("ip", "netns", "exec", "x", "true"), ("ip", "link", "add")
    made = commands.batches(
        [
            ("ip", "netns", "add", "x"),
            second,
            first,
            first,
            ("ip", "-n", "x", "link"),
            ("ip", "-n", "x", "address"),
        ]
    )
    assert made == [
        (("ip", "-batch", "-"), "netns add x\nlink add\n"),
        (first, ""),
        (first, ""),
        (("ip", "-n", "x", "-batch", "-"), "link\naddress\n"),
    ]


def test_a_program_learns_its_address_and_whom_to_join():
    first, last = (
        commands.environment(line(3), node, f"{node}:1", {each: f"{each}:1" for each in line(3).nodes})
        for node in ("n0", "n2")
    )
    assert "CHAOSNET_JOIN" not in first
    assert last["CHAOSNET_JOIN"] == "n1:1"
    assert last["CHAOSNET_LISTEN"] == "n2:1"


def test_each_part_of_an_overlay_in_parts_founds_a_cluster_of_its_own():
    parts = Topology({("a", "b"): LinkSpec(), ("c", "d"): LinkSpec()}, ["a", "b", "c", "d", "e"])
    at = {node: f"{node}:1" for node in parts.nodes}
    joins = {node: commands.environment(parts, node, at[node], at).get("CHAOSNET_JOIN") for node in at}
    assert joins == {"a": None, "b": "a:1", "c": None, "d": "c:1", "e": None}


def test_a_cut_has_no_rate():
    tbf = {"kind": "tbf", "options": {"rate": 1}}  # Bytes a second, as commands.cut_end sets it.
    assert in_force([tbf])["cut"] and in_force([tbf])["rate_mbit"] == 0.0


def printed(*args):
    done = CliRunner().invoke(command_line, [*map(str, args)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_overlays_and_traces_are_printed_and_read_back(tmp_path):
    path = tmp_path / "overlay.yaml"
    path.write_text(printed("new", "random", 8, "--seed", 3, "--links", 12))
    assert Topology.read(path).links == random_overlay(8, 3, 12).links
    sites = Topology.from_text(printed("new", "two-sites", 4, "--rate", 500, "--delay", 1))
    assert sites.spec(("n0", "n1")) == LinkSpec(rate_mbit=500.0, delay_ms=1.0)
    told = printed("rates", path, "--every", 60, "--for", 180)
    trace = Trace.from_text(told, Topology.read(path))
    assert [(due_s, len(changes)) for due_s, changes in trace.moments()] == [
        (60.0, 12),
        (120.0, 12),
        (180.0, 12),
    ]


@pytest.mark.parametrize("words", ["rates FILE", "plot FILE o.png", "trace FILE", "rates GOOD --for inf",
                                   "rates GOOD --every inf --for inf", "rates GOOD --for 1e300"])  # fmt: skip
def test_a_file_or_time_that_cannot_be_is_an_error_of_one_line(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_bytes(b"\xff\xfe")
    (tmp_path / "GOOD").write_text(PAIR.to_text())
    monkeypatch.setattr(testbed, "_opened", lambda name: SimpleNamespace(topology=PAIR))
    with pytest.raises(
        ConfigError, match=r"testbed: (FILE: no UTF-8 text|--every .* \(expected).*"
    ) as refused:
        command_line.main(words.split(), standalone_mode=False)
    assert "\n" not in str(refused.value)


def test_a_folder_that_another_user_has_made_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("CHAOSNET_TESTBEDS", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.getuid", lambda: 12_345)
    (tmp_path / "chaosnet-testbeds-12345").mkdir()
    for words in (["down"], ["ls"]):
        with pytest.raises(ConfigError, match=r"chaosnet-testbeds-12345: another user has made it"):
            command_line.main(words, standalone_mode=False)
    assert list((tmp_path / "chaosnet-testbeds-12345").iterdir()) == []


@pytest.mark.parametrize("words", ["ls", "show", "cut n0 n1", "up GOOD --backend relay"])
def test_a_folder_that_nobody_may_look_into_is_named(tmp_path, monkeypatch, words):
    (tmp_path / "GOOD").write_text(PAIR.to_text())
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHAOSNET_TESTBEDS", str(tmp_path / "file" / "up"))
    with pytest.raises(ConfigError, match=r"testbed: .*file/up.*: Not a directory"):
        command_line.main(words.split(), standalone_mode=False)
