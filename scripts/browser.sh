#!/usr/bin/env bash
# Finds Chromium for the tests of the dashboard, or installs Debian's package, which takes root and a minute.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
  if found=$(command -v "$name"); then
    echo "$found"
    exit 0
  fi
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "there is no Chromium; as root on Debian: apt-get install chromium" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
command -v chromium
