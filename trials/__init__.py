"""Trials of chaosnet on this machine: the half minute of `chaosnet demo`, the hours of `chaosnet soak`."""
