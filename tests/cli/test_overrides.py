"""Flags of `titan-loop train`: any field, schedules as text, one line for what does not fit."""

from dataclasses import dataclass, field

import pytest

from titan_loop.cli.overrides import apply_overrides
from titan_loop.errors import UserError
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer


@dataclass(kw_only=True, slots=True)
class Inner:
    seq_len: int = 256
    compile: bool = False

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise UserError(f"inner.seq_len={self.seq_len} must be at least 1")


@dataclass(kw_only=True, slots=True)
class Outer:
    total_tokens: int = 1
    learning_rate: Schedule = field(default_factory=lambda: Schedule.constant(1e-3))
    sources: list[str] = field(default_factory=list)
    inner: Inner = field(default_factory=Inner)


def parse(*arguments: str) -> Outer:
    return apply_overrides(Outer(), arguments, "titan-loop train sample")


def test_fields_at_any_depth_are_set_and_others_keep_the_recipes_value():
    config = parse("--inner.seq-len", "8", "--inner.compile", "--sources", "a,b")
    assert config == Outer(sources=["a", "b"], inner=Inner(seq_len=8, compile=True))


def test_both_spellings_of_a_flag():
    assert parse("--total_tokens", "3") == parse("--total-tokens=3") == Outer(total_tokens=3)


@pytest.mark.parametrize("arguments", [["--total-tokens", "1.4M"], ["--total_tokens=1.4M"]])
def test_token_counts_accept_suffixes(arguments):
    assert parse(*arguments) == Outer(total_tokens=1_400_000)


def test_suffixes_are_for_tokens_only():
    with pytest.raises(UserError, match=r"expected --inner\.seq-len INT"):
        parse("--inner.seq-len", "4K")


def test_a_schedule_is_read_from_its_text():
    text = "0:0 linear 2M:0.0003"
    assert parse("--learning-rate", text).learning_rate == Schedule.parse(text)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--inner.seqlen", "3"], "unknown flag --inner.seqlen; nearest: --inner.seq-len"),
        (["--total-token", "3"], "unknown flag --total-token; nearest: --total-tokens"),
        (["stray"], "unknown argument stray"),
        (["--total-tokens", "0.0001K"], "tokens=0.0001K is not a whole number of tokens"),
        (["--total-tokens", "x"], "'x'; expected --total-tokens INT"),
        (["--learning-rate", "fast"], "schedule 'fast' has 'fast' where a number belongs"),
        (["--inner.seq-len"], "--inner.seq-len needs a value"),
        (["--inner.seq-len", "0"], "inner.seq_len=0 must be at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(arguments, expected):
    with pytest.raises(UserError) as caught:
        parse(*arguments)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "│" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["activation-checkpoint:full", "--total-tokens", "5"],
            "--total-tokens stands after a choice such as activation-checkpoint:full; put",
        ),
        (
            ["activation-checkpoint:ful"],
            "unknown argument activation-checkpoint:ful; nearest: activation-checkpoint:full",
        ),
    ],
)
def test_a_misplaced_flag_and_a_misspelt_choice_of_a_trainer(arguments, expected):
    with pytest.raises(UserError) as caught:
        apply_overrides(LoopTrainer.Config(), arguments, "titan-loop train sample")
    assert str(caught.value).startswith(expected)


def test_help_lists_the_fields(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    assert "--inner.seq-len INT" in capsys.readouterr().out
