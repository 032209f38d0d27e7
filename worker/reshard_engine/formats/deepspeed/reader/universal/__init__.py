"""DeepSpeed universal checkpoints: an atom per parameter and state, and the model states of the run.

Source of every format fact here: deepspeed 0.19.8 `checkpoint/ds_to_universal.py`, verified by running it.
"""
