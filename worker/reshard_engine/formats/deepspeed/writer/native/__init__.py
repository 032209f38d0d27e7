"""DeepSpeed's own files for a given layout: what plain `engine.load_checkpoint` reads on as many ranks."""
