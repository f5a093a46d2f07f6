"""Shell scripts that train a recipe's arms and show committed results."""

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TRAIN = """
source tools/corpus.sh
titan_loop() { echo "titan-loop $*"; }
again=$2 seeds=0 stages=(plain identity)
train_arms retrofit_smollm2
"""


@pytest.mark.parametrize("again", ["", "-again"])
def test_a_script_says_what_it_did_not_train_and_how_to(again):
    command = ["bash", "-euc", TRAIN, "tools/retrofit.sh", "--gemma3", again]
    printed = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    assert printed.count("titan-loop train retrofit_smollm2 --stage") == (2 if again else 0)
    said = "2 results were there already and nothing was trained for them"
    assert (said in printed) == (not again)
    assert ("bash tools/retrofit.sh --gemma3 --again" in printed) == (not again)
