"""Flags of `titan-loop train`: any field, schedules as text, one line for what does not fit."""

from dataclasses import dataclass, field

import pytest

from titan_loop.cli.flag_help import FIRST, flags_of
from titan_loop.cli.overrides import apply_overrides
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.errors import UserError
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.training.callback import Callback
from titan_loop.training.preflight import remarks
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
    optional: float | None = None


def parse(*arguments: str) -> Outer:
    return apply_overrides(Outer(), arguments, "titan-loop train sample")


def test_fields_at_any_depth_are_set_and_others_keep_the_recipes_value():
    schedule = "0:0 linear 2M:0.0003"
    flags = ("--inner.seq_len", "8", "--inner.compile", "--sources", "a,b")
    config = parse(*flags, "--learning-rate", schedule)
    assert config == Outer(
        sources=["a", "b"],
        inner=Inner(seq_len=8, compile=True),
        learning_rate=Schedule.parse(schedule),
    )


def test_flags_beside_a_callback_with_fields():
    @dataclass(frozen=True)
    class Draws(Callback):
        probabilities: list[float]

    class Learns(Callback):
        def __init__(self, probabilities: list[float]) -> None:
            self.probabilities = probabilities

    config = LoopTrainer.Config(callbacks=(Draws([1.0]), Learns([1.0])))
    parsed = apply_overrides(config, ["--debug.seed", "7"], "titan-loop train sample")
    assert (parsed.debug.seed, parsed.callbacks) == (7, config.callbacks)


@pytest.mark.parametrize(
    "arguments", [["--total-tokens", "1.4M"], ["--total_tokens=1.4M"], ["--total-tokens", "1.4e6"]]
)
def test_token_counts_accept_suffixes(arguments):
    assert parse(*arguments) == Outer(total_tokens=1_400_000)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--inner.seqlen", "3"], "unknown flag --inner.seqlen; nearest: --inner.seq-len"),
        (["stray"], "unknown argument stray"),
        (["--total-tokens", "0.0001K"], "--total-tokens=0.0001K is not a whole number of tokens"),
        (["--optional", "3X"], "--optional=3X is not a number; write it like 0.1"),
        (["--learning-rate", "fast"], "schedule 'fast' has 'fast' where a number belongs"),
        (["--inner.seq-len", "4K"], "--inner.seq-len=4K is not a whole number; write it like"),
        (["--inner.seq-len"], "Missing value for argument '--inner.seq-len'"),
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


def test_help_shows_the_first_flags_and_help_all_every_one(capsys):
    def page(word: str) -> str:
        with pytest.raises(SystemExit) as stop:
            apply_overrides(LoopTrainer.Config(), [word], "titan-loop train sample")
        assert stop.value.code == 0
        return capsys.readouterr().out

    first, everything = page("--help"), page("--help-all")
    shown = [line.split()[0] for line in first.splitlines() if line.startswith("  --")]
    assert set(shown) == {f"--{name}" for texts in FIRST.values() for name in texts}
    assert "--learning-rate (0.0003)\n      learning rate, a schedule over global tokens" in first
    assert "activation-checkpoint:full" in first
    known = flags_of(LoopTrainer.Config()).keys()
    assert f"lists all {len(known)} flags" in first
    assert not any("pipeline-parallel" in name or "initial-load" in name for name in known)
    listed = {word.strip(",") for word in everything.split() if word.startswith("--")}
    assert known - {"--activation-checkpoint", "--recurrence.backward-growth"} <= listed
    for gone in ("validator", "lr-scheduler"):
        assert not any(gone in name for name in listed), gone


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        (
            "activation-checkpoint:full --total-tokens",
            "--total-tokens stands after a choice such as",
        ),
        ("activation-checkpoint:ful", "nearest: activation-checkpoint:full"),
        ("--lr", "unknown flag --lr; nearest: --learning-rate"),
        ("--seed", "unknown flag --seed; nearest: --dataloader.seed, --debug.seed"),
        ("--frm", "unknown flag --frm; --help-all lists all flags"),
        ("--parallelism.pipeline-parallel-degree", "has no effect: a loop over layers"),
        ("--checkpoint.last-save-in-hf", "has no effect: titan-loop convert export"),
        ("--model.recurrent-steps", "has no effect: training runs --recurrence.steps"),
        ("--loss.num-chunks", "unknown flag --loss.num-chunks"),
        ("--loss.loss-fn.global-vocab-size=3", "unknown flag --loss.loss-fn.global-vocab-size"),
        ("--model.family", "unknown flag --model.family"),
        ("--checkpoint.folder", "unknown flag --checkpoint.folder"),
        ("--compile.components", "unknown flag --compile.components"),
    ],
)
def test_flags_that_are_not_there_say_which_are(flag, expected):
    with pytest.raises(UserError) as caught:
        apply_overrides(LoopTrainer.Config(), [*flag.split(), "2"], "titan-loop train sample")
    assert expected in str(caught.value)


@pytest.mark.parametrize("words", [["3", "5"], ["3,5"]], ids=str)
def test_lists_are_separated_by_spaces_or_commas(words):
    tasks = [word.replace("3", "mano").replace("5", "held_out") for word in words]
    flags = ["--suite.depths", *words, "--suite.tasks", *tasks, "activation-checkpoint:full"]
    config = apply_overrides(LoopTrainer.Config(), flags, "titan-loop train sample")
    assert config.suite.depths == [3, 5]
    assert config.suite.tasks == ["mano", "held_out"]
    assert config.activation_checkpoint is not None
    equals = [f"--suite.depths={','.join(words)}", f"--suite.tasks={','.join(tasks)}"]
    again = apply_overrides(LoopTrainer.Config(), equals, "titan-loop train sample")
    assert (again.suite.depths, again.suite.tasks) == ([3, 5], ["mano", "held_out"])


@pytest.mark.parametrize("reader", ["branch-scale=1", "residual-scale=visits", "readout-rank=2"])
def test_steps_that_the_model_is_built_for_are_a_flag_of_options_that_read_them(reader):
    flags = ["--held-out.interval", "0", "--recurrence.steps", "8", f"--model.{reader}"]
    bare = LoopTrainer.Config(model=OuroOptions(), dataloader=TaskLoader.Config())
    config = apply_overrides(bare, flags, "titan-loop train sample")
    assert any("is made for model.recurrent_steps=3" in remark for remark in remarks(config))
    flags += ["--model.recurrent-steps", "8"]
    config = apply_overrides(bare, flags, "titan-loop train sample")
    assert config.model.recurrent_steps == 8
    assert not any("is made for" in remark for remark in remarks(config))
