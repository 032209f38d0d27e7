"""The writer of DeepSpeed's own files for a given layout: plain `engine.load_checkpoint` reads them."""
