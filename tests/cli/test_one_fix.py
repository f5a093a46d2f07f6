"""`plan`, `slurm submit` and `train` say the same of the same fault, fix and flag included."""

import pytest

from titan_loop.cli.main import main
from titan_loop.cli.stage_flags import resolve_recipe
from titan_loop.errors import UserError
from titan_loop.recipes.start import check_placed


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        (("--training.local-batch-size", "4"), "global-batch-tokens of multiples of 3,072 tokens"),
        (("--parallelism.tensor-parallel-degree", "3"), "parallelism.tensor_parallel_degree=3"),
    ],
)
def test_one_fault_has_one_fix(flags, fix, source, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = ["quickstart", *flags, "--dataloader.mixture", f"{source}=1"]
    place = ["--nodes", "3", "--gpus-per-node", "1"]
    resolved = resolve_recipe(recipe[0], recipe[1:])
    resolved.place()
    with pytest.raises(UserError) as raised:
        check_placed(resolved, 3)
    said = str(raised.value)
    assert fix in said
    assert main(["plan", *recipe, *place]) == 2
    assert f"refused: quickstart: {said}\n" in capfd.readouterr().out
    assert main(["slurm", "submit", *recipe, *place, "--time", "1:00:00", "--dry-run"]) == 2
    assert f"titan-loop: error: {said}\n" in capfd.readouterr().err
