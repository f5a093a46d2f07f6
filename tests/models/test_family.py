"""Families: found by name, with options that are read, written and refused."""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import get_type_hints

import pytest

from titan_loop import plugins
from titan_loop.bounds import refused
from titan_loop.cli.overrides import apply_overrides
from titan_loop.errors import UserError
from titan_loop.families.ouro.model import OURO, OuroOptions
from titan_loop.families.xllm.model import XllmOptions
from titan_loop.inference.exit_policy import QExit, require_exit_policy
from titan_loop.models.family import (
    Family,
    FamilyName,
    build_decoder,
    completed_architecture,
    decoder_config,
    get_family,
    read_options,
    size_notes,
)
from titan_loop.training.trainer import LoopTrainer


def test_recorded_options_are_read_back_and_name_their_family():
    options = OuroOptions(n_layers=3, rope_theta=5e4)
    recorded = asdict(options)
    assert recorded["family"] == "ouro"
    assert read_options(recorded) == options


def test_a_retired_option_is_read_with_the_value_that_models_still_have():
    recorded = asdict(XllmOptions()) | {"student": 0}
    assert read_options(recorded) == XllmOptions()
    record = decoder_config(XllmOptions(), max_seq_len=8).architecture
    assert completed_architecture(record | {"student": 0}) == record
    with pytest.raises(UserError, match="student=2: family xllm has no such option"):
        read_options(recorded | {"student": 2})


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ({"family": "ourro"}, "model.family=ourro is unknown; nearest: ouro"),
        ({"family": "../ouro"}, "is unknown"),
        ({"family": ["ouro"]}, "is unknown"),
        ({"decode": 1, "family": "ouro"}, "model.decode=1: family ouro has no such option"),
    ],
)
def test_what_this_version_does_not_know_is_refused(recorded, message):
    with pytest.raises(UserError, match=message):
        read_options(recorded)


@pytest.mark.parametrize("name", plugins.names("families"))
def test_a_family_with_a_default_of_its_own_keeps_the_bounds_of_the_field(name):
    options = get_family(name).options
    kinds = [get_type_hints(kind, include_extras=True) for kind in options.__mro__[:-1]]
    bounded = {field for hints in kinds for field, hint in hints.items() if _refuses(hint)}
    assert [field for field in bounded if not _refuses(kinds[0][field])] == []


def _refuses(hint) -> bool:
    return any(list(refused("field", number, hint)) for number in (-1, math.nan))


@dataclass(kw_only=True, slots=True)
class _DeepOptions(OuroOptions):
    family: FamilyName = field(default="deep", init=False)
    twist: float = 1.0


def test_the_recipes_instance_decides_which_options_the_command_line_has(monkeypatch):
    deep = Family(
        name="deep",
        options=_DeepOptions,
        sizes=OURO.sizes,
        decoder_config=OURO.decoder_config,
        uses=frozenset({"held_out"}),
        exit_policies=frozenset({"static"}),
        runtime_options=OURO.runtime_options | {"twist"},
    )
    monkeypatch.setitem(plugins._known, "families", {"deep": deep, "ouro": OURO})
    config = LoopTrainer.Config(model=_DeepOptions())
    config = apply_overrides(config, ["--model.twist", "2", "--model.size", "quickstart"], "train")
    assert config.model == _DeepOptions(twist=2.0, size="quickstart")
    assert read_options(asdict(config.model)) == config.model
    with pytest.raises(UserError, match=r"unknown flag --model.decode"):
        apply_overrides(config, ["--model.decode", "2"], "train")
    with pytest.raises(UserError, match=r"unknown flag --model.family"):
        apply_overrides(config, ["--model.family", "ouro"], "train")
    with pytest.raises(UserError, match="=deep does not support export, only held_out"):
        get_family("deep").require("export")
    model = build_decoder(_DeepOptions(), max_seq_len=8, device="meta")
    with pytest.raises(UserError, match=r"exit=q is an exit policy that model.family=deep"):
        require_exit_policy(model, QExit(0.5))


def test_a_family_of_ones_own_is_found_through_the_environment(monkeypatch, tmp_path):
    (tmp_path / "family_of_a_user.py").write_text(
        "from dataclasses import dataclass, field\n"
        "from titan_loop.families.ouro.model import OURO, OuroOptions\n"
        "from titan_loop.models.family import Family, FamilyName\n"
        "from titan_loop.plugins import Plugin, register\n"
        "@dataclass(kw_only=True, slots=True)\n"
        "class Options(OuroOptions):\n"
        "    family: FamilyName = field(default='mine', init=False)\n"
        "MINE = Family(name='mine', options=Options, sizes={},"
        " decoder_config=OURO.decoder_config)\n"
        "register(Plugin(families={'mine': 'family_of_a_user:MINE'}))\n"
    )
    monkeypatch.setitem(plugins._known, "families", {"ouro": OURO})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"model.family=mine is unknown.*TITAN_LOOP_PLUGINS"):
        get_family("mine")
    monkeypatch.setenv("TITAN_LOOP_PLUGINS", "family_of_nobody")
    with pytest.raises(UserError, match="no module 'family_of_nobody'"):
        get_family("mine")
    monkeypatch.setenv("TITAN_LOOP_PLUGINS", "family_of_a_user")
    assert "rope_theta" in {option.name for option in fields(get_family("mine").options)}


def test_a_size_with_another_shape_says_what_differs():
    vocabulary, size = size_notes(OuroOptions(size="53m", n_layers=5), 1024)
    assert vocabulary == "model.vocab_size=1024, the vocabulary of the data"
    # As Ouro prints it: 53,228,545 parameters; every layer has 4 D² + 3 D F + 4 D of them.
    layer = 4 * 512**2 + 3 * 512 * 1536 + 4 * 512
    here = 53_228_545 - layer - 2 * 512 * (32_000 - 1024)
    assert size == (
        f"model.size=53m has {here:,} parameters here, and 53,228,545 as named: "
        "n_layers=5 instead of 6, vocab_size=1024 instead of 32000"
    )
