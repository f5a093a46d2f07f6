"""The verbs of the latent family: which runs they take, and their tables."""

from pathlib import Path

import pytest

from tests.contracts.runs import small_run
from tests.families.latent.contract import run
from tests.support.tiny import act_as_launched, train_run
from titan_loop.errors import UserError
from titan_loop.families.ouro.model import OuroOptions
from train_configs.latent import solved as analysis
from train_configs.latent.solved import repair, solved


@pytest.mark.usefixtures("alone")
def test_only_models_of_the_family_are_analysed(tmp_path: Path, monkeypatch):
    act_as_launched(1)
    smooth, mano = tmp_path / "smooth", tmp_path / "mano"
    train_run(run("continuous", smooth, 1))
    monkeypatch.setattr(analysis, "share_solved", lambda *_, count: (0.5, 5))
    assert solved(smooth).record["solved"]["9_nodes"] == "0.500"
    with pytest.raises(UserError, match="smooth is not a discrete model of the family latent"):
        repair(smooth)
    train_run(small_run(mano, OuroOptions(), steps=2))
    with pytest.raises(UserError, match="was not trained on"):
        solved(mano)
