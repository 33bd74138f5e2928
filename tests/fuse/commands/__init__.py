"""``fpfs-ctl`` and the control socket on a real mount."""
