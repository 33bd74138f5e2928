"""What every other layer stands on: errors, limits, layouts, and the engine protocol."""
