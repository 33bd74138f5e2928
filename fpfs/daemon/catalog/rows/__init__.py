"""Queries: one module for each kind of row. Who calls it commits."""
