"""Casts of floating tensors, on the processor and on a device, and the losses that they count."""
