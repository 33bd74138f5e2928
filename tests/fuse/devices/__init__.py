"""Device directories under a mount: changed, full, failing, damaged, checked and exported."""
