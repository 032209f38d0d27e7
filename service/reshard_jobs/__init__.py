"""Job records in SQL: the owner, the progress and the outcome of each job."""
