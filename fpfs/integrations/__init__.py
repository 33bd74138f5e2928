"""What makes other packages save and load by fpfs: one file for each, which imports it."""
