"""The Chaos paper's evaluation (Sec. VI): one command a figure."""

from __future__ import annotations

from .chaos_scale_out import fig7_command, fig8_command, fig10_command, fig15_command, fig16_command

__all__ = ["fig7_command", "fig8_command", "fig10_command", "fig15_command", "fig16_command"]
