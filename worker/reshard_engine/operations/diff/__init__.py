"""`reshard diff`: two checkpoints compared by logical tensor, whatever their layouts and formats."""
