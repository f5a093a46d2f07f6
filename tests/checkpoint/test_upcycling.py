"""Layers are duplicated as said; what the deeper model computes is exactly what is claimed.

h_r = norm(f(h_{r-1})) with f the stack. Stacked k times, a step is norm(f(… f(h))): as k steps of
the old model without the norms between them. All model identities are bitwise, in float64, on
weights that went through a checkpoint.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.small_checkpoint import content
from titan_loop.checkpoint.manifest import read_manifest, reference
from titan_loop.checkpoint.tensors import CheckpointReader, write_checkpoint
from titan_loop.checkpoint.upcycling import Mode, Moments, Upcycling, upcycle_checkpoint
from titan_loop.errors import UserError
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder

LENGTH = 12
COPIES = 3


def build(n_layers: int) -> LoopDecoder:
    model = build_decoder(OuroOptions(n_layers=n_layers), max_seq_len=LENGTH).double()
    generator = torch.Generator().manual_seed(n_layers)
    with torch.no_grad():
        for parameter in model.parameters():  # gains that differ, a gate that is not zero
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def upcycled(parent: LoopDecoder, folder: Path, upcycling: Upcycling) -> LoopDecoder:
    """Return the deeper model, by way of two checkpoints."""
    source, target = folder / "parent", folder / "child"
    write_checkpoint(source, parent.state_dict(), content(dim=64, n_layers=len(parent.layers)))
    upcycle_checkpoint(source, target, upcycling)
    reader = CheckpointReader(target)
    model = build(upcycling.n_layers)
    model.load_state_dict({key: reader.read(key) for key in reader.tensor_keys()})
    return model


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(128, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def states_by_hand(
    parent: LoopDecoder, tokens: Tensor, visits: list[int], steps: int
) -> list[Tensor]:
    """Apply the parent's layers in the order of `visits`, then its norm: one step."""
    context = parent.make_context(tokens)
    layers = list(parent.layers.values())
    hidden, states = parent.tok_embeddings(tokens), []
    for _ in range(steps):
        for visit in visits:
            hidden = layers[visit](hidden, context)
        hidden = parent.norm(hidden)
        states.append(hidden)
    return states


@pytest.mark.parametrize(
    ("mode", "visits"), [("stacked", [0, 1, 0, 1, 0, 1]), ("interleaved", [0, 0, 0, 1, 1, 1])]
)
def test_a_step_visits_the_old_layers_in_the_new_order_with_one_norm(
    tmp_path: Path, tokens: Tensor, mode: Mode, visits: list[int]
):
    parent = build(2)
    child = upcycled(parent, tmp_path, Upcycling(2 * COPIES, mode))
    output = child(tokens, recurrent_steps=3)
    expected = states_by_hand(parent, tokens, visits, 3)
    torch.testing.assert_close([*output.hidden_RBLD], expected, rtol=0, atol=0)
    for step in range(3):
        assert torch.equal(output.exit_logit_RBL[step], parent.gate(expected[step]))
        assert torch.equal(child.readout(expected[step]), parent.readout(expected[step]))


def optimiser_entries(n_layers: int) -> dict[str, Any]:
    """One weight a layer, and a norm, with AdamW's and Muon's state; every number differs."""
    names = [*(f"layers.{index}.attention.wq.weight" for index in range(n_layers)), "norm.weight"]
    entries: dict[str, Any] = {}
    for number, name in enumerate(names, start=1):
        entries[name] = torch.full((2, 3), float(number))
        entries[f"optimizer.state.{name}.exp_avg"] = torch.full((2, 3), 10.0 * number)
        entries[f"optimizer.state.{name}.exp_avg_sq"] = torch.full((2, 3), 100.0 * number)
        entries[f"optimizer.state.{name}.momentum_buffer"] = torch.full((2, 3), 1e3 * number)
        entries[f"optimizer.state.{name}.step"] = torch.tensor(7.0)
        entries[f"optimizer.param_groups.{name}.lr"] = 0.5 * number
        entries[f"optimizer.param_groups.{name}.betas"] = (0.9, 0.95)
    return entries


@pytest.mark.parametrize(
    ("moments", "first", "second", "step"),
    [("duplicate", 1, 1, 7), ("scale", 1 / 2, 1 / 2, 7), ("reset", 0, 0, 0)],
)
def test_moments_of_layers_follow_the_policy_and_others_stay(
    tmp_path: Path, moments: Moments, first: float, second: float, step: int
):
    write_checkpoint(tmp_path / "parent", optimiser_entries(2), content(dim=64, n_layers=2))
    upcycle_checkpoint(
        tmp_path / "parent", tmp_path / "child", Upcycling(4, "interleaved", moments)
    )
    reader = CheckpointReader(tmp_path / "child")
    expected = {}
    for new, old in enumerate([0, 0, 1, 1]):
        name, number = f"layers.{new}.attention.wq.weight", old + 1.0
        expected[name] = torch.full((2, 3), number)
        expected[f"optimizer.state.{name}.exp_avg"] = torch.full((2, 3), 10 * number * first)
        expected[f"optimizer.state.{name}.exp_avg_sq"] = torch.full((2, 3), 100 * number * second)
        expected[f"optimizer.state.{name}.momentum_buffer"] = torch.full(
            (2, 3), 1e3 * number * first
        )
        expected[f"optimizer.state.{name}.step"] = torch.tensor(float(step))
        assert reader.read_object(f"optimizer.param_groups.{name}.lr") == 0.5 * number
        assert reader.read_object(f"optimizer.param_groups.{name}.betas") == (0.9, 0.95)
    unchanged = {key: v for key, v in optimiser_entries(2).items() if "norm.weight" in key}
    expected.update({key: v for key, v in unchanged.items() if isinstance(v, Tensor)})
    found = {key: reader.read(key) for key in reader.tensor_keys()}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(reader.keys()) == 5 * 7


def test_the_manifest_says_which_layer_came_from_which_and_data_go_on(tmp_path: Path):
    source, target = tmp_path / "parent", tmp_path / "child"
    files = [tmp_path / name for name in ("pipeline_00001.safetensors", "answers_0.safetensors")]
    for number, file in enumerate(files):
        file.write_bytes(b"%d" % number)
    ended = content(dim=64, n_layers=2) | {"stage_end": True}
    write_checkpoint(source, optimiser_entries(2), ended, copied=files)
    upcycle_checkpoint(source, target, Upcycling(6, "stacked", "reset"))
    assert (target / files[0].name).read_bytes() == b"0"
    assert not (target / files[1].name).exists()
    old, new = read_manifest(source), read_manifest(target)
    assert new["lineage"] == {
        "parent": reference(source),
        "stage": "1a",
        "upcycled": {
            "mode": "stacked",
            "moments": "reset",
            "n_layers": 2,
            "layers": [0, 1, 0, 1, 0, 1],
        },
    }
    assert new["trainer"]["architecture"] == {"dim": 64, "n_layers": 6}
    for name in ("step", "tokens", "recurrent_steps"):
        assert new["trainer"][name] == old["trainer"][name]
    assert new["data"] == old["data"]
    assert new["files"][files[0].name] == old["files"][files[0].name]
    assert new["stage_end"] is False


def test_bad_plans_are_one_line(tmp_path: Path):
    source = tmp_path / "parent"
    write_checkpoint(source, optimiser_entries(4), content(n_layers=4))
    for n_layers in (6, 9, 4, 2, 0, -8):
        with pytest.raises(UserError, match=rf"layers={n_layers} .* 4 layers two or more .* 8, 12"):
            upcycle_checkpoint(source, tmp_path / "child", Upcycling(n_layers))
    with pytest.raises(UserError, match=r"branch_scale=2.0 .* only a model with 0.0 can grow"):
        Upcycling(8).sources({"n_layers": 4, "branch_scale": 2.0})
    assert not (tmp_path / "child").exists()
