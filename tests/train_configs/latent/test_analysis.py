"""The verbs of the latent family: which runs they take, and their tables."""

from pathlib import Path

import pytest

from tests.contracts.runs import small_run
from tests.families.latent.contract import run
from tests.support.tiny import act_as_launched
from titan_loop.errors import UserError
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.training.run import run_training
from train_configs.latent import analysis
from train_configs.latent.analysis import circuit_tables, repair, solved


@pytest.mark.usefixtures("alone")
def test_only_models_of_the_family_are_analysed(tmp_path: Path, monkeypatch):
    act_as_launched(1)
    smooth, mano = tmp_path / "smooth", tmp_path / "mano"
    run_training(run("continuous", smooth, 1))
    monkeypatch.setattr(analysis, "share_solved", lambda *_, count: (0.5, 5))
    assert solved(smooth).record["solved"]["9_nodes"] == "0.500"
    with pytest.raises(UserError, match="smooth is not a discrete model of the family latent"):
        repair(smooth)
    run_training(small_run(mano, OuroOptions(), steps=2))
    with pytest.raises(UserError, match="was not trained on"):
        solved(mano)


def test_tables_have_a_row_for_each_group_and_leave_out_what_is_empty():
    record = {
        "name_groups": [[0, 2], [], [1], [3]],
        "value_groups": [[1], []],
        "amplification": {"operand 1": {"value": 1.005, "syntax": 2}},
        "frequencies": {"logits": {"0 0": 0.12345, "j j": 12}},
        "errors": {"right": 7},
    }
    assert list(circuit_tables(record).values()) == [
        [
            ["heads that belong to", "operand 1", "operand 2", "result"],
            ["names", "0 2", "-", "1", "3"],
            ["values", "1", "-", ""],
        ],
        [["norm amplification", "value", "syntax"], ["operand 1", "1.00", "2.00"]],
        [["mean norm of the DFT", "0 0", "j j"], ["logits", "0.123", "12"]],
        [["equations", "right"], ["count", "7"]],
    ]
    assert [*circuit_tables({**record, "amplification": {}})] == [
        "Heads by the change they respond to",
        "Frequencies of the last layer",
        "Errors by their source",
    ]
