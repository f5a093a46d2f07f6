"""Bounds and data of evaluations while a model trains."""

from types import SimpleNamespace
from typing import Any

import pytest

from titan_loop.errors import UserError
from titan_loop.training import evaluation_config
from titan_loop.training.evaluation_config import HeldOutConfig


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


def test_sources_that_cannot_be_scored_are_remarked_once():
    config = HeldOutConfig(sources=["short", "own"])
    (remark,) = config.remarks(["short", "a"], 32)
    assert remark.startswith("short fills no window of 32: neither held_out nor titan-loop eval")
    assert config.scored(["a"], 32) == ["own"]
    assert HeldOutConfig().scored(["short", "a"], 32) == ["a"]


@pytest.mark.parametrize(
    ("config", "training", "vocabulary", "message"),
    [
        (HeldOutConfig(), ["short"], 1, None),  # held-out text is asked where there is some
        (HeldOutConfig(interval=0, sources=["gone"]), ["a"], 1, None),
        (HeldOutConfig(interval=5), ["a", "short"], 100, None),
        (
            HeldOutConfig(interval=5),
            ["a"],
            99,
            "held_out.sources=['a']: the largest token 99 does not fit model.vocab_size=99",
        ),
        (HeldOutConfig(sources=["gone"]), ["a"], 100, "gone has no source.json"),
    ],
)
def test_data_that_cannot_be_scored_is_refused(config, training, vocabulary, message):
    refusals = [str(refusal) for refusal in config.data_refusals(training, vocabulary, 32)]
    assert refusals == ([] if message is None else [message])


def test_a_source_named_twice_is_opened_once(mixtures):
    config = HeldOutConfig(interval=5, sources=["a", "b"])
    assert not [*config.data_refusals(["./a"], 100, 32)]
    assert mixtures == [["a=1", "b=1"]]
