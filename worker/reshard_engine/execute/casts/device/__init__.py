"""Casts on a GPU: batches pass through pinned memory, sums check the transfers, measurements choose the batches."""
