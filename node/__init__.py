"""What runs on every machine: the agent, its loop, transport, all-reduce and state replication."""
