"""Sums over the cluster: gradients in lanes and chunks, and the all-reduce's work on them."""
