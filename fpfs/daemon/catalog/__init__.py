"""The catalog: the SQLite database, its two replicas, and the thread that works with them."""
