"""Conversion needs one shard and one tensor, however large the model is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SHARD_BYTES = 12_000_000
LARGEST_TENSOR_BYTES = 4 * 2048 * 512
SLACK_BYTES = 8_000_000  # above the 14.3 MB measured in all; the limit is for other allocators


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_one_shard_and_one_tensor(tmp_path: Path, tokenizer_file: Path):
    driver = Path(__file__).with_name("memory_driver.py")
    answer = subprocess.run(
        [sys.executable, driver, tmp_path, tokenizer_file, str(SHARD_BYTES / 1e9)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[4],
        env={
            "PATH": "",
            "PYTHONPATH": str(Path(__file__).parents[4]),
            "OMP_NUM_THREADS": "1",
            # Freed tensors go back to the system at once; else 16 to 46 MB were measured.
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_THRESHOLD_": "131072",
        },
    )
    assert answer.returncode == 0, answer.stderr
    measured = json.loads(answer.stdout.splitlines()[-1])
    assert len(list((tmp_path / "large-exported").glob("*.safetensors"))) >= 6
    limit = SHARD_BYTES + LARGEST_TENSOR_BYTES + SLACK_BYTES
    assert limit < measured["weights"] / 3  # so a copy of the model cannot hide in the slack
    assert measured["growth"] < limit, measured
