"""The parent of a run: where it is, and the differences that may be carried."""

from pathlib import Path

import pytest

from titan_loop.checkpoint import start_from
from titan_loop.checkpoint.start_from import StartFrom, check_parent
from titan_loop.errors import UserError

SAVED = {"family": "ouro", "n_layers": 4, "dim": 64, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("wanted", "carry", "message"),
    [
        ({"dim": 65}, StartFrom(), r"model\.dim=65 \(checkpoint: 64\).* or another parent$"),
        ({"n_layers": 8}, StartFrom(), r"n_layers=8 .* or checkpoint\.carry\.upcycle=stacked$"),
        ({"n_layers": 6}, StartFrom(), r"n_layers=6 .* or another parent$"),
        ({"n_layers": 8, "dim": 65}, StartFrom(), r"or another parent$"),
        ({"branch_factor": 0.5}, StartFrom(), r"gives at model\.recurrent_steps=0\.5 \(check"),
        ({"decode": True}, StartFrom(), r"model\.decode=True \(checkpoint: unknown\)"),
        ({"exit_gate": True}, StartFrom(), r"model\.exit_gate=True \(checkpoint: unknown\)"),
        ({"dim": 65}, StartFrom(keep_initial=["exit_gate.*"]), r"model\.dim=65"),
        ({"n_layers": 6}, StartFrom(upcycle="stacked"), "layers=6 does not repeat"),
    ],
)
def test_differences_that_are_not(monkeypatch, wanted, carry, message):
    monkeypatch.setattr("titan_loop.checkpoint.model.completed_architecture", dict)
    with pytest.raises(UserError, match=message):
        check_parent(SAVED, {**SAVED, **wanted}, carry)


def test_a_parent_is_a_checkpoint_or_a_run_with_one(tmp_path: Path, monkeypatch):
    newest = {tmp_path / "run" / "checkpoints": (7, {})}
    monkeypatch.setattr(start_from, "newest_good", lambda folder, look_at: newest.get(folder))
    monkeypatch.setattr(start_from, "is_committed", lambda path: path.name == "step-3")
    found = StartFrom(parent=str(tmp_path / "step-3")).find_parent()
    assert found == tmp_path / "step-3"
    assert StartFrom(parent=str(tmp_path / "run")).find_parent() == (
        tmp_path / "run" / "checkpoints" / "step-7"
    )
    with pytest.raises(UserError, match="is neither a checkpoint nor a run that has one"):
        StartFrom(parent=str(tmp_path / "other")).find_parent()
