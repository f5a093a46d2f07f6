"""The verbs of the latent family: which runs they take, and their tables."""

from pathlib import Path

import pytest
import torch

from tests.contracts.runs import small_run
from tests.families.latent.contract import run
from tests.support.tiny import act_as_launched, train_run
from titan_loop.errors import UserError
from titan_loop.families.latent.model import LatentOptions
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.family import build_decoder
from train_configs.latent import solved as analysis
from train_configs.latent.solved import repair, share_repaired, solved
from train_configs.latent.task import DagArithmetic

TASK = DagArithmetic(modulus=5, nodes=8, leaves=4, names=16, test_nodes=(8,))


@pytest.mark.usefixtures("alone")
def test_only_models_of_the_family_are_analysed(tmp_path: Path, monkeypatch):
    act_as_launched(1)
    smooth, mano = tmp_path / "smooth", tmp_path / "mano"
    config = run(smooth, 1)
    config.model.state = "continuous"  # type: ignore[attr-defined]
    train_run(config)
    monkeypatch.setattr(analysis, "share_solved", lambda *_, count: (0.5, 5))
    assert solved(smooth).record["solved"]["9_nodes"] == "0.500"
    with pytest.raises(UserError, match="smooth is not a discrete model of the family latent"):
        repair(smooth)
    train_run(small_run(mano, OuroOptions(), steps=2))
    with pytest.raises(UserError, match="was not trained on"):
        solved(mano)


def test_repair_counts_what_one_step_restores(monkeypatch):
    options = LatentOptions(vocab_size=7, factors=TASK.factor_sizes, relative_window=8)
    built = build_decoder(options, max_seq_len=120).eval()

    def solver(told: torch.Tensor, positions: torch.Tensor, **named) -> object:
        states.append(told)
        return type("Output", (), {"hidden_RBLD": (told,)})

    def share(says) -> float:
        class Model:
            config = built.config
            lm_head = staticmethod(says)
            __call__ = staticmethod(solver)

        return share_repaired(Model(), TASK, "8_nodes", count=20)  # type: ignore[arg-type]

    states: list[torch.Tensor] = []
    one_hot = torch.nn.functional.one_hot
    assert share(lambda state: one_hot(state, 7)) == 0  # repeats what it is told
    examples = [TASK.encode(q) for q in TASK.held_out_questions(20, TASK.strata["8_nodes"])]
    length = states[0].shape[1]
    solved = torch.zeros(20, length, dtype=torch.int64)
    for row, example in enumerate(examples):
        solved[row, : min(length, len(example.labels))] = torch.from_numpy(example.labels[:length])
    assert share(lambda state: one_hot(solved, 7)) == 1
    hit = (states[0] != solved) & (states[0] != TASK.empty)
    depths = [torch.from_numpy(example.columns["depth"]) for example in examples]
    for row in range(20):
        at = hit[row].nonzero().flatten()
        at = at[at < len(depths[row])]
        assert len(at)
        assert len({int(depths[row][a]) for a in at}) == 1  # of one step
