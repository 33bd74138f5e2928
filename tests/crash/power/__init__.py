"""The power-cut simulator: records programs, cuts, mounts what is left, judges it."""
