"""Alembic's migrations of the job database. They are in the wheel: `reshard db upgrade` needs no checkout.

A new revision is a module of `versions` with the next number, and `reshard_jobs.database.HEAD` is that number.

- Programs of the revision before run on during and after the upgrade. So a revision adds: tables, columns that are
  nullable or have a default of the database, indexes. What no program of the oldest allowed revision uses any more is
  removed one release later.
- `oldest_program` of a revision is the oldest revision whose programs may run on it. It goes into the database.
- All revisions of an upgrade are one transaction, and its locks stop the workers: a revision takes milliseconds.
- No revision is undone: go back with a backup.
"""
