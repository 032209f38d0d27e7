"""Training files with whole tensors: one file, or one of the model and one of its optimizer."""
