"""The production cores on a virtual clock and network."""
