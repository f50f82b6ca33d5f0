"""The elected role: cluster monitor, shard plan, sync plan, and the order of views. No I/O, no torch."""
