"""What a script's process does beside its training: its node, its steps, its ending, and what it tells."""
