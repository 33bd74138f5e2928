"""How mounts begin and end: commands, options, users, mount(8), systemd."""
