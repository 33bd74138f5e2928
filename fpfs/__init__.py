"""fpfs: a filesystem that makes saving a model's checkpoint as fast as the devices under it."""

__version__ = "0.1.0"
