"""A wire between two namespaces on which packets take their time: `far_wire.py NS_A DEV_A NS_B DEV_B SECONDS`.

For kernels without netem. Unlike the relay of `chaosnet testbed`, it carries packets, so handshakes and
acknowledgements take their time, too. Both ends are TUN devices; it says "up" once they are there. Root.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
PACKET_BYTES = 1 << 16


def tun(namespace: str, device: str) -> int:
    """A new device there. Leaves this process in that namespace."""
    with open(f"/run/netns/{namespace}", "rb") as place:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


def carry(ends: tuple[int, int], way_s: float) -> None:
    """For ever."""
    under_way = {end: deque[tuple[float, bytes]]() for end in ends}  # By where they arrive.
    while True:
        now_s = time.monotonic()
        for end, packets in under_way.items():
            while packets and packets[0][0] <= now_s:
                os.write(end, packets.popleft()[1])
        due_s = min((packets[0][0] for packets in under_way.values() if packets), default=now_s + 1.0)
        readable, _, _ = select.select(ends, (), (), max(0.0, due_s - now_s))
        for end in readable:
            other = ends[1] if end == ends[0] else ends[0]
            under_way[other].append((time.monotonic() + way_s, os.read(end, PACKET_BYTES)))


def main() -> None:
    """As the module says."""
    here, device, there, other_device, way_s = sys.argv[1:]
    ends = tun(here, device), tun(there, other_device)
    print("up", flush=True)
    carry(ends, float(way_s))


if __name__ == "__main__":
    main()
