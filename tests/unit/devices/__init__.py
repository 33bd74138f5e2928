"""Device directories, policies, and what works on them in use."""
