#!/usr/bin/env bash
# The wheel as a user installs it: outside a checkout it builds the quick start's data, trains and
# generates, and it brings one top-level package.
#
#   bash tools/test_wheel.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

folder=$(mktemp -d "${TMPDIR:-/tmp}/titan-loop-wheel.XXXXXX")
trap 'rm -rf "$folder"' EXIT
git archive HEAD | tar -x -C "$folder" --one-top-level=source # no build leaves files in the checkout
"$VENV/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" "$folder/source"
# The environment holds the declared dependencies alone. With the packages of the tests beside them, nobody
# noticed that datatrove imports regex without declaring it.
"$VENV/bin/python" -m venv --without-pip "$folder/environment"
"$VENV/bin/python" -P - "$("$folder/environment/bin/python" -c 'import site; print(site.getsitepackages()[0])')" <<'PYTHON'
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

folder, queue, seen = Path(sys.argv[1]), [("titan-loop", "")], set()
while queue:
    name, extra = each = queue.pop()
    if each in seen:
        continue
    seen.add(each)
    try:
        found = distribution(name)
    except PackageNotFoundError:
        continue  # of another system
    for wanted in map(Requirement, found.requires or []):
        if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
            queue += [(wanted.name, more) for more in ("", *wanted.extras)]
    for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
        if not (folder / top).exists() and not re.match("titan.loop", top.strip("_")):
            (folder / top).symlink_to(found.locate_file(top))
PYTHON
"$VENV/bin/python" -m pip --python "$folder/environment/bin/python" install --quiet --no-deps \
    --force-reinstall "$folder"/titan_loop-*.whl
"$VENV/bin/python" -m zipfile -l "$folder"/titan_loop-*.whl >"$folder/files.txt"
tops=$(awk 'NR > 1 { split($1, part, "/"); print part[1] }' "$folder/files.txt" | grep -v 'dist-info$' | sort -u)
grep -q titan_loop/serve/page.html "$folder/files.txt"
[ "$tops" = titan_loop ] || { echo "the wheel has the packages: $tops" >&2; exit 1; }

mkdir "$folder/elsewhere"
cd "$folder/elsewhere"
export OMP_NUM_THREADS=1
titan_loop=$folder/environment/bin/titan-loop
from=$("$folder/environment/bin/python" -c 'import titan_loop; print(titan_loop.__file__)')
[[ $from == "$folder/environment"/* ]] || { echo "titan_loop comes from $from" >&2; exit 1; }
! "$titan_loop" train quickstart 2>advice.txt
grep -q 'titan-loop data demo' advice.txt
"$titan_loop" data demo --code-megabytes 0.2 --prose-megabytes 0.2 --math-megabytes 0.1 \
    --held-out-fraction 0.2
"$titan_loop" train quickstart --total-tokens 4096 --held-out.interval 0
"$titan_loop" train runs/quickstart --total-tokens 8192
"$titan_loop" generate runs/quickstart --prompt 'def ' --max-new-tokens 4
"$titan_loop" recipes | grep depth_demo
echo "tools/test_wheel.sh: the wheel works outside a checkout"
