"""Names of files and folders that the client and the engine both write or look for."""

from __future__ import annotations

MANIFEST = "reshard.json"
"""The manifest of a target."""
RECORDS = ".reshard"
"""Folder of results and records of `ensure` inside a save directory. It is hidden, because Trainer and Accelerate
delete checkpoints by the names in the directory above. It lies inside, so that it is deleted with its checkpoint."""
POINTERS = ("latest", "latest_universal")
"""The files in which DeepSpeed names the tag that a run resumes from."""
