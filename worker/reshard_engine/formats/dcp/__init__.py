"""PyTorch's distributed checkpoints (DCP), as FSDP, torchtitan, Accelerate, the Trainer and Lightning save them."""
