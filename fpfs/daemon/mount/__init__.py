"""Keeper and server: how a mount begins, goes on and ends."""
