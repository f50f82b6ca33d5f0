"""The network interfaces of this machine: the addresses that others may reach it at, and the bytes they moved."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

import psutil

from .endpoint import ANY_HOST, Endpoint

MAX_ADDRESSES = 16  # As many as a message takes.


def advertised(listen: str) -> tuple[str, ...]:
    """What to tell others if we listen at "[KEY@]HOST:PORT": that, or, if it means all interfaces, one for each."""
    if not listen:
        return ()
    return reached_at(listen) or (str(Endpoint.parse(listen).at("127.0.0.1")),)


def reached_at(listen: str) -> tuple[str, ...]:
    """As `advertised`; but none if it means all interfaces and there is no network."""
    if not listen:
        return ()
    here = Endpoint.parse(listen)
    if here.host not in ANY_HOST:
        return (listen,)
    return tuple(str(here.at(each)) for each in _own(v6=here.host == "::"))[:MAX_ADDRESSES]


def unheard(listen: str, told: tuple[str, ...]) -> str:
    """Why other machines will not find a node that listens at `listen` and tells `told`; "" if they may."""
    if not listen or Endpoint.parse(listen).host not in ANY_HOST:
        return ""
    here, asked = Endpoint.parse(told[0]), Endpoint.parse(listen)
    if here.host != "127.0.0.1":
        return ""
    if asked.host != "::" and _own(v6=True):
        return (
            f"this machine has addresses of IPv6 only, and this node listens to IPv4: others are told {here.place}, "
            f"where only nodes of this machine reach it. Start it again with --listen [::]:{asked.port}"
        )
    return (
        f"this machine has no network now: others are told {here.place}, where only nodes of this machine reach it. "
        "Start it again once there is one"
    )


def _own(v6: bool) -> list[str]:
    """Addresses of interfaces that are up; neither loopback nor link-local ones, which others cannot use."""
    stats = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses if name in stats and stats[name].isup else ():
            try:
                address = ipaddress.ip_address(each.address)
            except ValueError:  # A hardware address; a link-local one with its zone.
                continue
            if (address.version == 4 or v6) and not (address.is_loopback or address.is_link_local):
                found.append(str(address))
    return found


# --- what psutil counts: it lets any error through that a missing or odd file of the kernel causes ---


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes since the machine was started."""

    sent: int
    received: int


def traffic() -> Traffic:
    """The traffic of all interfaces but loopback; zero where it cannot be read."""
    try:
        by_name = psutil.net_io_counters(pernic=True)
    except Exception:
        by_name = {}
    counters = [each for name, each in by_name.items() if not name.startswith("lo")]
    return Traffic(sum(each.bytes_sent for each in counters), sum(each.bytes_recv for each in counters))


def used(process: psutil.Process) -> tuple[float, int]:
    """Since it was last asked: of one core, in percent; and bytes resident now. Zeros where they cannot be read."""
    try:
        return process.cpu_percent(), process.memory_info().rss
    except Exception:  # Also where a process has opened as many files as it is allowed to.
        return 0.0, 0


def battery_pct() -> float:
    """How full this machine's battery is; -1 where there is none, or where it cannot be read."""
    try:
        battery = psutil.sensors_battery()
    except Exception:
        return -1.0
    return float(battery.percent) if battery else -1.0
