"""One test on a real mount for every FUSE operation and every promise about semantics."""
