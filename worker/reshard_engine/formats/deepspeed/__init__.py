"""DeepSpeed checkpoints, native and universal: names, configuration, tensor-parallel rules, readers, writers."""
