"""Device directories: what makes one, and the set of them that a mount has."""
