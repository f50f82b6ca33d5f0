"""The command line: front ends read options and call what does the work, imported only then; and what they print."""
