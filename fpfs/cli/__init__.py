"""The commands fpfs and fpfs-ctl: arguments in, tables out, no logic."""
