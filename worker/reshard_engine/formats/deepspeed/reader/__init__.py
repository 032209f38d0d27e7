"""Readers of DeepSpeed's native checkpoints and of universal ones."""
