"""Job records in SQL: the truth about who owns a job, how far it is and how it ended."""
