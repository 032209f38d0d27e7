"""Short processes that read a checkpoint's metadata for the API."""
