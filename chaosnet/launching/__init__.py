"""`chaosnet launch`, and what is checked before a node starts."""
