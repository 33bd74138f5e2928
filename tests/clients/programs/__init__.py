"""Programs that the client tests run as processes of their own."""
