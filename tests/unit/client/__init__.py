"""fpfs.client without a mount: the container, the archive, the file that replaces another."""
