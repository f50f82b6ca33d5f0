"""Links as bad as the edge's, on one machine: overlays of shaped links, traces that change them, back ends."""

from .backend import Backend, TestbedError
from .topology import LinkSpec, Topology
from .trace import SpecChange, Trace

__all__ = ["Backend", "LinkSpec", "SpecChange", "TestbedError", "Topology", "Trace"]
