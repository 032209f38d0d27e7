"""Workers: claim a job, run the engine in one killable subprocess, and record the outcome."""
