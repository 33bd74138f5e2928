"""The catalog: its two copies, and the queries for each kind of row."""
