"""What goes wrong on purpose: devices, calls, clients, servers, bits."""
