#!/usr/bin/env bash
# datatrove 0.10.1: MinHash deduplication imports `regex`, which the package does not declare. With its declared
# packages alone, `from datatrove.pipeline.dedup.minhash import MinhashDedupSignature` raises ModuleNotFoundError,
# where other steps that need a further package say which one to install. `regex` comes in by way of other packages
# (sacrebleu, transformers, …) where people test, so that it shows on a user's machine first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install datatrove==0.10.1
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import requires

declared = [each for each in requires("datatrove") if "extra ==" not in each]
print("declared:", *sorted(declared))
try:
    from datatrove.pipeline.dedup.minhash import MinhashDedupSignature
except ModuleNotFoundError as error:
    print("MinhashDedupSignature:", error)
    assert error.name == "regex"
else:
    raise SystemExit(f"{MinhashDedupSignature} is imported")
assert not any(each.startswith("regex") for each in declared)

from datatrove.pipeline.readers import JsonlReader

try:
    JsonlReader("nowhere")
except ImportError as error:
    print("JsonlReader:", error)
    assert "pip install orjson" in str(error)
PYTHON
