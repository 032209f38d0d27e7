#!/usr/bin/env bash
# The software bill of materials (CycloneDX, JSON) of what the service's image installs: sbom.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"$python" -m venv "$environment"
"$environment/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[service,postgres]' cyclonedx-bom
mkdir -p sbom
"$environment/bin/cyclonedx-py" environment --of JSON --output-file sbom/reshard.cdx.json "$environment/bin/python"
echo "sbom/reshard.cdx.json: $(grep -c '"bom-ref"' sbom/reshard.cdx.json) entries"
