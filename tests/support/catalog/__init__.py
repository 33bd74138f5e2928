"""Catalogs and the name plane without a mount."""
