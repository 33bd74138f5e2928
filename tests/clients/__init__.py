"""Clients that must work unmodified on a mount, each with the real package."""
