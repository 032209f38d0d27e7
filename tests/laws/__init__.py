"""The laws of resharding over generated checkpoints."""
