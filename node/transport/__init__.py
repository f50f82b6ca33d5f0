"""Links to peers over ZeroMQ: how they open, carry and close."""
