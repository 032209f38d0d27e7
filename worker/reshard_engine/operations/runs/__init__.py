"""The checkpoints of a run: their list, the newest complete checkpoint, and the removal of old ones."""
