#!/usr/bin/env bash
# Runs `COMMAND... PYTHON=<path>` for each supported CPython on this machine, each version once, the main one left out:
# python3.11 to 3.13 on the PATH and in /usr/bin, and all versions of pyenv where there is one.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

declare -A done=()
declare -a outcomes=()
status=0
version() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null; }
# The Python of .venv, or the one that it will be made with: the Makefile looks for it in the same order.
main=.venv/bin/python
[[ -x $main ]] || main=$(type -P python3.11 || type -P python3)
found=$(version "$main")
[[ -n $found ]] && done[$found]=1

roots=$(command -v pyenv >/dev/null && pyenv root)
for minor in 3.11 3.12 3.13; do
  for python in $(type -aP "python$minor") "/usr/bin/python$minor" ${roots:+"$roots"/versions/"$minor".*/bin/python}; do
    # A shim of pyenv does not run unless its version is chosen; a prerelease is not a supported Python.
    found=$(version "$python")
    [[ $found =~ ^[0-9.]+$ && -z ${done[$found]:-} ]] || continue
    done[$found]=1
    echo "== Python $found"
    if "$@" "PYTHON=$python"; then outcomes+=("$found passed"); else outcomes+=("$found FAILED"); status=1; fi
  done
done
((${#outcomes[@]})) && printf '%s\n' "${outcomes[@]}" || echo "no other Python is here"
exit "$status"
