"""Settings: a table of all of them, their groups in a script, and what they come to."""
