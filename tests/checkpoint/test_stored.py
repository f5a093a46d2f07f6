"""A run of commit dfd5e2b4 (version 0.1.0) is read for ever: config, metrics, checkpoint, source.

`stored/dfd5e2b4.tar.xz` holds what `tests.support.tiny.tiny_config` wrote there with four steps,
an average of the weights, spikes watched, and D = 8, one layer, two heads, F = 16. The checkpoint
of the last step is left out, so that going on from step 2 must repeat steps 3 and 4.
"""

import tarfile
from pathlib import Path

import pytest
import titan_loop.compat  # noqa: F401  (before any torchtitan module)

from titan_loop.checkpoint.keep_policy import KeepPolicy
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.recipes.recorded import recorded_recipe
from titan_loop.recipes.start import run_recipe
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun

STORED = Path(__file__).with_name("stored") / "dfd5e2b4.tar.xz"
# Other processors add in another order.
TOLERANCE = 1e-5


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # the run names its source by a relative path
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run"


def test_its_records_are_read(run):
    saved = SavedRun.open(run)
    assert (saved.steps(), saved.seq_len, saved.total_tokens) == ([2], 32, 1024)
    assert (saved.optimizer, saved.trainable, saved.keep_policy) == ("adamw", "all", KeepPolicy())
    assert saved.tokenizer(saved.tokenizer().path).is_known
    assert [ancestor.run for ancestor in saved.lineage()] == [run]
    checkpoint = saved.checkpoint()
    assert checkpoint.manifest["trainer"]["architecture"]["hidden_dim"] == 16
    reader = CheckpointReader(checkpoint.path)
    assert reader.read("optimizer.ema.tok_embeddings.weight").shape == (264, 8)
    record = RunDirectory(run).read_run()
    assert record["commit"] == "dfd5e2b4"


@pytest.mark.usefixtures("alone")
def test_it_goes_on_as_it_did(run):
    before = RunDirectory(run).read_metrics()
    recipe = recorded_recipe(run / "config.json", goes_on=True)
    run_recipe(recipe)
    after = RunDirectory(run).read_metrics()
    assert [record["step"] for record in after] == [1, 2, 3, 4]
    for old, new in zip(before, after, strict=True):
        for name in ("loss", "grad_norm", "ce/step_2", "lr", "tokens"):
            assert new[name] == pytest.approx(old[name], rel=TOLERANCE), name
    assert SavedRun(run).checkpoint().step == 4
