"""Finds processes of one script that were started alike, without each other's addresses: each would train alone.

torchrun, srun and mpirun tell each process its number and how many there are, in the environment. That is no address,
so chaosnet does not join by it (docs/launch.md); it only shows that there are others.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..node.endpoint import Endpoint
from ..node.node_settings import NodeSettings

# Who starts processes: its variables for the number of this one, and for how many there are. Of Slurm's that of the
# step, which only srun sets: a batch script, and a shell within an allocation, have SLURM_NTASKS and run once.
STARTERS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpirun": ("PMI_RANK", "PMI_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}


def alone_among_many(settings: NodeSettings, environ: Mapping[str, str]) -> str:
    """What to tell if this node founds a cluster that no other one was told of, though there are others; else ""."""
    # At a port that was chosen others may ask.
    if not settings.founds or Endpoint.parse(settings.listen).port:
        return ""
    for starter, (number, count) in STARTERS.items():
        if number in environ and environ.get(count, "").isdecimal() and int(environ[count]) > 1:
            return (
                f"{number}={environ[number]} and {count}={environ[count]} are set, as by {starter}, which tells no "
                f"address: each of the {environ[count]} processes founds a cluster of its own and trains alone "
                "(expected for all of them CHAOSNET_CLUSTER=NAME, or CHAOSNET_JOIN=ADDRESS,... and CHAOSNET_FOUND=1)"
            )
    return ""
