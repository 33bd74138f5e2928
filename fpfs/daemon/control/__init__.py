"""The control socket: who may ask what, and what answers."""
