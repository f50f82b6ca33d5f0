"""Plans for pipelines x data parallelism, and which of them to recover with (Chameleon, ElasWave): pure functions."""
