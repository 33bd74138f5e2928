"""Control socket, figures, options and the parts of mounting that need no mount."""
