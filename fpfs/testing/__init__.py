"""Support for tests: the memory engine, and real mounts that are always taken down."""
