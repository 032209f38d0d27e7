"""DeepSpeed checkpoints: file names, model states, and one module per way of partitioning.

Source of every format fact here: deepspeed 0.19.8 (`runtime/engine.py`, `runtime/zero/stage_1_and_2.py`,
`runtime/zero/stage3.py`, `runtime/bf16_optimizer.py`), older shapes from its git history.
"""
