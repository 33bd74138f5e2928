"""Random operations on a mount and on a plain directory side by side, compared."""
