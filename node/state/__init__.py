"""The training state: taken from live objects, copied, sent, loaded, written to disk."""
