"""`chaosnet.launching.hosts`: what a hosts file says; `orders`: lines between a launcher and its hosts."""

import pytest

from chaosnet.launching.hosts import LaunchHost, check_addresses, parse_hosts, taken_for
from chaosnet.launching.launcher import Job
from chaosnet.launching.orders import member_line, parsed_line
from chaosnet.protocols.errors import ConfigError

FILE = "hosts.txt"


def test_a_line_is_a_host_with_fields_and_a_comment():
    text = "# mine\n\nn1\nme@n2 port=6000 slots=2  # two GPUs\nn3 address=[fd00::3]\n"
    assert parse_hosts(text, FILE) == (
        LaunchHost("n1"),
        LaunchHost("me@n2", port=6000, slots=2),
        LaunchHost("n3", address="fd00::3"),
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("n1 slot=2", "'slot=2' is no field (expected address=, port=, slots=)"),
        ("n1 port=1 port=2", "'port' is there twice (expected each field once)"),
        ("n1 n2", "'n2' is no field (expected address=, port=, slots=)"),
        ("n1 slots=0", "slots=0 is no number of that kind (expected 1 to 64)"),
        ("n1 port=65535 slots=2", "port=65535 is no number of that kind (expected 1 to 65534)"),
        ("n1 port=ssh", "port=ssh is no number of that kind (expected 1 to 65535)"),
        ("n1 address=10.0.0.1:22", "address=10.0.0.1:22 is none (expected a name or an IP address, without a port)"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is no host (expected [USER@]HOST, as ssh takes it)"),
        ("n slots=2\nn-1", "'n-1' is the name of a member of another line (expected hosts named otherwise)"),
        ("me@n0", "'n0' is there twice (expected one line for each host; slots=2 starts two members)"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_is_named_with_its_number(line, problem):
    with pytest.raises(ConfigError) as error:
        parse_hosts(f"n0\n{line}\n", FILE)
    assert str(error.value) == f"hosts.txt, line {1 + len(line.splitlines())}: {problem}"


def test_a_file_without_hosts_is_an_error():
    with pytest.raises(ConfigError, match="names no host"):
        parse_hosts("# none\n", FILE)


def test_an_address_is_what_ssh_takes_a_host_for():
    assert taken_for(LaunchHost("me@n1"), "user me\nhostname 10.0.0.2\nport 22\n") == "10.0.0.2"
    assert taken_for(LaunchHost("me@n1"), "") == "n1"


def test_an_address_that_only_its_machine_reaches_is_refused_beside_others():
    check_addresses([LaunchHost("a", "127.0.0.1", 1), LaunchHost("b", "localhost", 2)])
    with pytest.raises(
        ConfigError, match=r"^b: its address 127.0.0.1 is one at which no other host reaches it"
    ):
        check_addresses([LaunchHost("a", "10.0.0.1"), LaunchHost("b", "127.0.0.1")])


def test_two_members_at_one_port_are_refused():
    with pytest.raises(ConfigError, match=r"^b: 10.0.0.1:5556 is where a listens, too"):
        check_addresses([LaunchHost("a", "10.0.0.1", 5555, 2), LaunchHost("b", "10.0.0.1", 5556)])


def job(key=""):
    return Job(("ssh",), "python3", "/job", ("train.py",), {}, key, 60.0)


def test_members_are_told_of_all_hosts_in_their_order_and_of_all_keys():
    one, two = LaunchHost("n1", "10.0.0.1", 5555, 2), LaunchHost("n2", "fd00::2")
    orders = job("c" * 52).orders(two, [(one, "a" * 52), (two, "b" * 51 + "a")])
    assert [(member.name, member.listen) for member in orders.members] == [("n2", "[::]:5555")]
    ends = ("a" * 52 + "@10.0.0.1:5555", "a" * 52 + "@10.0.0.1:5556", "b" * 51 + "a@[fd00::2]:5555")
    assert orders.join == ",".join(ends)
    assert orders.allowed == ["a" * 52, "b" * 51 + "a", "c" * 52]


def test_without_keys_nobody_is_told_of_any_and_one_alone_joins_nobody():
    alone = LaunchHost("n1", "10.0.0.1")
    orders = job("c" * 52).orders(alone, [(alone, "")])
    assert (orders.join, orders.allowed) == ("", [])
    assert orders.members[0].listen == "0.0.0.0:5555"


def test_the_home_of_the_user_there_is_found_there():
    own = Job(("ssh", "-p", "1"), "~/my env/bin/python", "", (), {}, "", 0.0)
    assert own.command("n1")[-2:] == ("n1", "exec ~/'my env/bin/python' -m chaosnet.launching.launched")


def test_what_a_member_has_said_is_heard_as_it_was():
    assert parsed_line(member_line(12, b"e", b"a b\r")) == (12, "e", b"a b\r")
    assert parsed_line(b"Welcome to n1\n") is None and parsed_line(b"\n") is None
