"""`.metadata` of distributed checkpoints: the pickle that says which chunks of which tensors lie where."""
