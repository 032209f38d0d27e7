"""Casts on a GPU: batches go there and come back through pinned memory, checked by sums, chosen by measurement."""
