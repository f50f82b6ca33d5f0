"""`python -m chaosnet` is `chaosnet`."""

from chaosnet.cli import main

main()
