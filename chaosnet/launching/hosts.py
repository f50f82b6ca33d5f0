"""The hosts of a launch: a text file, one a line, and the members that run there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ..identity import is_loopback
from ..node.endpoint import Endpoint
from ..protocols.errors import ConfigError

PORT = 5555
MAX_SLOTS = 64
MAX_NAME = 60  # Of a member's 64 characters: the rest is its number.
FIELDS = "address=, port=, slots="


@dataclass(frozen=True, slots=True)
class LaunchHost:
    """One line.

    Attributes:
        login: What ssh is given: "host" or "user@host".
        address: Where the other hosts reach this one, without brackets; "" for what ssh takes it for.
        port: At which its first member listens; each further one at the next.
        slots: Members.
    """

    login: str
    address: str = ""
    port: int = PORT
    slots: int = 1

    @property
    def name(self) -> str:
        """What people call it."""
        return self.login.rpartition("@")[2]

    @property
    def members(self) -> tuple[str, ...]:
        """Their names."""
        if self.slots == 1:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(self.slots))

    def ends(self, key: str) -> tuple[Endpoint, ...]:
        """Where other hosts reach its members, which hold `key`."""
        return tuple(Endpoint(self.address, self.port + number, key) for number in range(self.slots))

    def listens(self) -> tuple[str, ...]:
        """Where its members listen: on all interfaces, as an address may be one that a router forwards."""
        if is_loopback(self.address):
            here = "::1" if ":" in self.address else "127.0.0.1"
        else:
            here = "::" if ":" in self.address else "0.0.0.0"
        return tuple(Endpoint(here, each.port).place for each in self.ends(""))


def parse_hosts(text: str, file: str) -> tuple[LaunchHost, ...]:
    """Those of a hosts file. Raises: ConfigError that names the file and the line."""
    found: dict[str, LaunchHost] = {}
    members: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{file}, line {number}"
        host = _host(words, where)
        if host.name in found:
            _refuse(
                where, f"{host.name!r} is there twice", "one line for each host; slots=2 starts two members"
            )
        if called := members.intersection(host.members):
            _refuse(
                where, f"{min(called)!r} is the name of a member of another line", "hosts named otherwise"
            )
        found[host.name] = host
        members.update(host.members)
    if not found:
        raise ConfigError(f"{file}: names no host (expected one a line: [USER@]HOST)")
    return tuple(found.values())


def _host(words: Sequence[str], where: str) -> LaunchHost:
    login, *fields = words
    given: dict[str, str] = {}
    for field in fields:
        name, equals, value = field.partition("=")
        if not equals or f"{name}=" not in FIELDS.split(", "):
            _refuse(where, f"{field!r} is no field", FIELDS)
        if name in given:
            _refuse(where, f"{name!r} is there twice", "each field once")
        given[name] = value
    name = login.rpartition("@")[2]
    if "=" in login or "," in login or login.startswith("-") or not 0 < len(name) <= MAX_NAME:
        _refuse(where, f"{login!r} is no host", "[USER@]HOST, as ssh takes it")
    slots = _number(given, "slots", 1, MAX_SLOTS, where)
    port = _number(given, "port", PORT, 65536 - slots, where)
    return LaunchHost(login, _bare(given.get("address", ""), where), port, slots)


def _bare(address: str, where: str) -> str:
    """Without brackets."""
    bare = address[1:-1] if address.startswith("[") and address.endswith("]") else address
    if any(each in bare for each in "@,/[]") or (bare.count(":") == 1):
        _refuse(where, f"address={address} is none", "a name or an IP address, without a port")
    return bare


def _number(given: dict[str, str], name: str, default: int, most: int, where: str) -> int:
    text = given.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        _refuse(where, f"{name}={text} is no number of that kind", f"1 to {most}")
    return int(text)


def _refuse(where: str, what: str, expected: str) -> NoReturn:
    raise ConfigError(f"{where}: {what} (expected {expected})")


def taken_for(host: LaunchHost, configuration: str) -> str:
    """The address of a host without `address=`, by what `ssh -G` has printed; its own name if that says nothing."""
    for line in configuration.splitlines():
        name, _, value = line.strip().partition(" ")
        if name.lower() == "hostname" and value:
            return value
    return host.name


def check_addresses(hosts: Sequence[LaunchHost]) -> None:
    """Raises: ConfigError for one that only its own machine reaches, beside others that are elsewhere."""
    alone = [host for host in hosts if is_loopback(host.address)]
    if alone and len(alone) < len(hosts):
        raise ConfigError(
            f"{alone[0].name}: its address {alone[0].address} is one at which no other host reaches it "
            "(expected address=ADDRESS behind it in the hosts file)"
        )
    taken: dict[Endpoint, str] = {}
    for host in hosts:
        for end in host.ends(""):
            if end in taken:
                raise ConfigError(
                    f"{host.name}: {end.place} is where {taken[end]} listens, too "
                    "(expected another port= or address=)"
                )
            taken[end] = host.name


def seeds(ends: Iterable[Endpoint]) -> str:
    """Whom all members ask, in the order in which they are to found: as `join` takes it."""
    return ",".join(map(str, ends))
