"""One module per measurement; `chaosnet bench NAME` runs it."""
