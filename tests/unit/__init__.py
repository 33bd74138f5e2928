"""One test for every module that can be tested without a mount."""
