"""The Chaos paper's evaluation (Sec. VI): one command a figure."""

from __future__ import annotations

from .chaos_components import fig3_command
from .chaos_convergence import fig11_command, fig12_command, fig13_command, fig14_command
from .chaos_example import fig1_command
from .chaos_primitives import fig9_command, table1_command
from .chaos_scale_out import fig7_command, fig8_command, fig10_command, fig15_command, fig16_command

__all__ = [
    "fig1_command", "fig3_command", "fig7_command", "fig8_command", "fig9_command", "fig10_command", "fig11_command",
    "fig12_command", "fig13_command", "fig14_command", "fig15_command", "fig16_command", "table1_command",
]  # fmt: skip
