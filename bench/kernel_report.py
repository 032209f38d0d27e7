"""Runs the command line or a worker's engine process, and records where its casts ran.

    BENCH_KERNEL_REPORT=FILE python bench/kernel_report.py reshard.cli.main convert SRC DST ...

The arguments are a module with a function `main`, and the arguments of that module. When the process exits, the file
gets one line of JSON: the report of the kernel that the process used, or nothing if it cast nothing.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys

VARIABLE = "BENCH_KERNEL_REPORT"


def record() -> None:
    """Append the report of this process's kernel to the file that the variable names."""
    placing = sys.modules.get("reshard_engine.execute.casts.placing")
    path = os.environ.get(VARIABLE)
    if placing is None or not path or not placing.default_kernel.cache_info().currsize:
        return
    kernel = placing.default_kernel()
    report = kernel.report() if hasattr(kernel, "report") else {"device": "", "off": "the reference casts"}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    module = sys.argv.pop(1)
    atexit.register(record)
    sys.exit(importlib.import_module(module).main())
