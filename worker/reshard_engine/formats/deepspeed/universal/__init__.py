"""DeepSpeed universal checkpoints: an atom per parameter and state, and the model states of the run."""
