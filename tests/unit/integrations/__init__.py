"""fpfs.integrations without a mount."""
