"""Native DeepSpeed checkpoints: files of ranks, as a run saves them."""
