"""Workers: claim a job, run the engine in one killable subprocess, record what became of it."""
