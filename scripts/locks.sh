#!/usr/bin/env bash
# deploy/images/*.txt: what the images install, in the versions of constraints.txt, with PyPI's digest of every file. Needs the network.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"$python" -m venv "$environment"
"$environment/bin/python" -m pip install --quiet --disable-pip-version-check uv==0.13.9

lock() { # OUTPUT ARGUMENT...
  "$environment/bin/uv" pip compile --quiet --no-header --no-annotate --generate-hashes -c constraints.txt \
    --python-version 3.11 --python-platform x86_64-unknown-linux-gnu \
    -o "deploy/images/$1" "${@:2}"
}
printf 'hatchling\nhatch-fancy-pypi-readme\n' | lock build.txt -
lock cpu.txt --extra service --extra postgres --extra otel --extra sign --extra azure --extra gcs --extra hub pyproject.toml
lock gpu.txt --extra service --extra postgres --extra otel --extra sign --extra azure --extra gcs --extra hub --extra worker pyproject.toml
