#!/usr/bin/env bash
# Tests and measures casts on this machine's GPU, without a network, in at most 7 minutes: gpu_proof.sh OUT [--size small].
# Needs Python 3.12 with torch, numpy, fsspec, ml-dtypes, xxhash, typer, rich, httpx, pytest and hypothesis, and the
# directory .whl of `make gpu-wheels`. OUT gets gpu_proof.json, gpu_proof.md (the table) and gpu_proof.log.
set -euo pipefail
if (($# == 0)); then
  sed -n '2,4s/^# //p' "$0"
  exit 2
fi
# The steps have limits of their own; this one ends the program if it hangs itself.
exec timeout --foreground --kill-after=8 412 "${PYTHON:-python3}" "$(dirname "$0")/../bench/gpu_proof.py" "$@"
