"""Train a PyTorch model on machines that come and go."""
