"""The namespace and pyfuse3's operations, over the memory engine."""
