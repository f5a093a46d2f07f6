"""The flags of a recipe, and the page of the important ones."""

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from titan_loop.cli.flag_help import flags_of, help_text
from titan_loop.training.schedule import Schedule


@dataclass
class Inner:
    seq_len: int = 32
    global_batch_size: int = 4  # without an effect here


@dataclass
class Config:
    total_tokens: int = 7
    training: Inner = field(default_factory=Inner)
    task: Annotated[Inner, tyro.conf.arg(name="")] = field(default_factory=Inner)
    learning_rate: Schedule = field(default_factory=lambda: Schedule.parse("1e-3"))
    derived: int = field(default=3, init=False)
    hidden: Annotated[int, tyro.conf.Suppress] = 5
    kind: type = Inner
    dump_folder: str = ""
    best: bool | None = None
    held_out: list[str] = field(default_factory=lambda: ["a", "b"])


def test_every_field_is_a_flag_but_those_without_an_effect():
    config = Config()
    assert flags_of(config) == {
        "--total-tokens": 7,
        "--training.seq-len": 32,
        "--seq-len": 32,  # of a section without a name
        "--global-batch-size": 4,
        "--learning-rate": config.learning_rate,
        "--kind": Inner,
        "--dump-folder": "",
        "--best": None,
        "--held-out": ["a", "b"],
    }


def test_the_page_shows_the_important_flags_with_their_values():
    flags = {**flags_of(Config()), "--dataloader.mixture": ["a=1", "b=2"]}
    lines = help_text(flags, "titan-loop train x", ["ouro", "moe"]).splitlines()
    assert lines[0] == "usage: titan-loop train x [FLAGS] [CHOICE]"
    for shown in (
        "  --total-tokens (7)",
        "  --training.seq-len (32)",
        "  --dataloader.mixture (a=1,b=2)",
        "  --dump-folder (none)",
        "  --best (none)",
    ):
        assert shown in lines
    assert lines[lines.index("  --total-tokens (7)") + 1].startswith("      tokens to train on")
    assert not any("--kind" in line or "--model.dim" in line for line in lines)
    assert "choices, each with a --help of its own: ouro, moe" in lines
    assert lines[-1] == "titan-loop train x --help-all lists all 10 flags."
    assert not any(line.startswith("choices") for line in help_text(flags, "x", []).splitlines())
