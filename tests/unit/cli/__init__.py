"""Commands, their help, and the documents that tell of them."""
