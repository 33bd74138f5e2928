"""Servers that are killed: what applications see, and what the next one finds."""
