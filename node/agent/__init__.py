"""The agent, which decides for one node: its core and the parts of it (Chaos, Sec. V-A1)."""
