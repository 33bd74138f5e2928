"""The order of durability, and what a takeover makes of it."""
