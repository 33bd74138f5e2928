"""The daemon: names in Python, bytes in the native engine, and what mounts and serves them."""
