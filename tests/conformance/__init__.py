"""Conformance suites of others, run against a mount."""
