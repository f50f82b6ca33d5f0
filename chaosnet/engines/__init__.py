"""What a cluster trains, and how: engines above one session (node/session.py)."""
