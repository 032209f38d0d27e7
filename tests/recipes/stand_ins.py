"""Stand-ins of what places processes: Slurm's `srun`, and the few functions of Ray and Dask that the recipes call."""

from __future__ import annotations

# As Slurm's: `-n` tasks, by default the job's, each with the variables of its step; the exit code is the highest one.
SRUN = """
import os, subprocess, sys
tasks, words = os.environ["SLURM_NTASKS"], sys.argv[1:]
while words[0].startswith("-"):
    word = words.pop(0)
    if word.startswith("-n"):
        tasks = word[2:]
ranks = [
    subprocess.Popen(words, env={**os.environ, "SLURM_NTASKS": tasks, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)})
    for r in range(int(tasks))
]
sys.exit(max(rank.wait() for rank in ranks))
"""

# Tasks are threads of the standard library's executor; the work is in processes of its own anyway.
RAY = """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(16)

def init():
    pass

def remote(**options):
    assert set(options) <= {"num_cpus", "max_retries", "scheduling_strategy"}
    def decorate(function):
        function.remote = lambda *args: pool.submit(function, *args)
        return function
    return decorate

def get(futures):
    return [future.result() for future in futures]
"""

DASK = """
from concurrent.futures import ThreadPoolExecutor

class Client:
    def __init__(self, address=None):
        self.pool = ThreadPoolExecutor(16)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.pool.shutdown()

    def submit(self, function, *args, pure, retries):
        return self.pool.submit(function, *args)

    def gather(self, futures):
        return [future.result() for future in futures]
"""
