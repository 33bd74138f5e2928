"""The commit: the only orderer of durability."""
