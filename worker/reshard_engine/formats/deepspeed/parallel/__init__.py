"""Model parallelism of DeepSpeed runs: tensors, pipelines, experts, and the rules of their cuts."""
