"""The control protocol: its questions, its answers, and the client that asks."""
