"""Bounds and data of evaluations while a model trains."""

from types import SimpleNamespace
from typing import Any

import pytest

from titan_loop.errors import UserError
from titan_loop.training import evaluation_config
from titan_loop.training.evaluation_config import HeldOutConfig, SuiteConfig


@pytest.fixture(autouse=True)
def mixtures(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Sources whose name begins with "short" fill no window; the largest token is 99."""
    opened: list[list[str]] = []

    def config(mixture: list[str]) -> Any:
        opened.append(mixture)
        if "gone=1" in mixture:
            raise UserError("gone has no source.json")
        return SimpleNamespace(vocabulary=lambda: SimpleNamespace(largest_token=99))

    def why_not(path: str, seq_len: int) -> str:
        return f"{path} fills no window of {seq_len}" if path.startswith("short") else ""

    monkeypatch.setattr(evaluation_config, "WindowLoader", SimpleNamespace(Config=config))
    monkeypatch.setattr(evaluation_config, "why_not_scored", why_not)
    return opened


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (HeldOutConfig(interval=-1), "held_out.interval=-1 is negative; 0 turns it off"),
        (HeldOutConfig(windows=0), "held_out.windows=0 must be at least 1"),
        (HeldOutConfig(depths=[]), "held_out.depths=[] must name depths of at least 1"),
        (HeldOutConfig(depths=[1, 0]), "held_out.depths=[1, 0] must name depths of at least 1"),
        (SuiteConfig(interval=1, depths=[0]), "suite.depths=[0] must name depths of at least 1"),
        (SuiteConfig(windows=0), "suite.windows=0 must be at least 1"),
        (SuiteConfig(questions=0), "suite.questions=0 must be at least 1"),
        (SuiteConfig(interval=-1), "suite.interval=-1 is negative; 0 turns it off"),
    ],
)
def test_values_out_of_range_are_refused(config: HeldOutConfig | SuiteConfig, message: str):
    (refusal,) = config.refusals()
    assert str(refusal) == message


@pytest.mark.parametrize(
    "config",
    [
        HeldOutConfig(interval=1, windows=1, depths=[1]),
        HeldOutConfig(interval=0, depths=[]),
        SuiteConfig(interval=1, windows=1, questions=1, depths=[1]),
        SuiteConfig(depths=[]),  # turned off
    ],
)
def test_bounds_are_accepted(config: HeldOutConfig | SuiteConfig):
    assert not [*config.refusals()]


def test_a_suite_is_enabled_from_one_on():
    assert [SuiteConfig(interval=interval).enabled for interval in (0, 1)] == [False, True]


def test_sources_that_cannot_be_scored_are_remarked_once():
    config = HeldOutConfig(sources=["short", "own"])
    (remark,) = config.remarks(["short", "a"], 32)
    assert remark.startswith("short fills no window of 32: neither held_out nor titan-loop eval")
    assert config.scored(["a"], 32) == ["own"]
    assert HeldOutConfig().scored(["short", "a"], 32) == ["a"]


@pytest.mark.parametrize(
    ("config", "training", "message"),
    [
        (HeldOutConfig(interval=0), ["a"], "best=True, but held_out.interval=0; set that above 0"),
        (HeldOutConfig(), ["short"], "best=True, but no held-out text can be scored; leave it out"),
        (HeldOutConfig(), ["a"], None),
        (HeldOutConfig(interval=5), ["short", "a"], None),
    ],
)
def test_the_best_checkpoint_needs_held_out_text(config, training, message):
    refusals = [str(refusal) for refusal in config.best_refusals(training, 32)]
    assert refusals == ([] if message is None else [message])


@pytest.mark.parametrize(
    ("config", "training", "vocabulary", "message"),
    [
        (HeldOutConfig(), ["short"], 1, None),  # held-out text is asked where there is some
        (HeldOutConfig(interval=0, sources=["gone"]), ["a"], 1, None),
        (HeldOutConfig(interval=5), ["a"], 100, None),
        (HeldOutConfig(interval=5), ["a", "short"], 100, None),
        (HeldOutConfig(sources=["a"]), [], 100, None),
        (
            HeldOutConfig(interval=5),
            ["a"],
            99,
            "held_out.sources=['a']: the largest token 99 does not fit model.vocab_size=99",
        ),
        (HeldOutConfig(sources=["gone"]), ["a"], 100, "gone has no source.json"),
        (
            HeldOutConfig(interval=5),
            [],
            100,
            "held_out.interval=5: this data has no held-out text; set it to 0",
        ),
        (
            HeldOutConfig(interval=5),
            ["short"],
            100,
            "held_out.interval=5: short fills no window of 32; prepare it with a larger "
            "--held-out-fraction, name others with --held-out.sources, or set --held-out.interval "
            "0",
        ),
    ],
)
def test_data_that_cannot_be_scored_is_refused(config, training, vocabulary, message):
    refusals = [str(refusal) for refusal in config.data_refusals(training, vocabulary, 32)]
    assert refusals == ([] if message is None else [message])


def test_a_source_named_twice_is_opened_once(mixtures):
    config = HeldOutConfig(interval=5, sources=["a", "b"])
    assert not [*config.data_refusals(["./a"], 100, 32)]
    assert mixtures == [["a=1", "b=1"]]
