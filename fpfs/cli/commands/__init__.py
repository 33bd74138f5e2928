"""One module for each command of `fpfs-ctl`, and the larger ones of `fpfs`."""
