"""What a save may rely on: durability, versions, atomic directories, writers that are killed."""
