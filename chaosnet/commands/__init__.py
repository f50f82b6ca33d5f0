"""The command line: front ends read options, then import and call what does the work; and what they print."""
