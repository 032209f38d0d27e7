"""The revisions of the job database, one module each."""
