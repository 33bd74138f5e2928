"""Tools that work on device directories without a server: check, repair, and export."""
