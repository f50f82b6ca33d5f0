"""The production cores on a virtual clock and network: whole clusters in one thread, from one seed."""

from .many_runs import Summary, run_many
from .random_run import LifeOutcome, Violation, run

__all__ = ["LifeOutcome", "Summary", "Violation", "run", "run_many"]
