"""The model that a run trains, with what its options leave open."""

from typing import Any

from tests.evaluation.runs import write_checkpoint_of, write_run_of
from tests.support.tiny import TINY_VOCABULARY, tiny_config
from titan_loop.errors import UserError
from titan_loop.training.chosen_model import (
    are_prepared,
    chosen_model,
    saved_architecture,
    stage_architecture,
)


def test_what_is_open_is_that_of_the_weights(source, tmp_path):
    config = tiny_config(source, tmp_path)
    for saved, base in (({}, None), ({"rope_theta": 5e5}, 5e5), ({"rope_theta": 4e5}, 4e5)):
        chosen = chosen_model(config, saved)
        assert chosen.config.architecture["rope_theta"] == chosen.options.rope_theta
        assert base in (None, chosen.options.rope_theta)
    config.model.rope_theta = 7e5
    assert chosen_model(config, {"rope_theta": 5e5}).options.rope_theta == 7e5


def test_an_open_vocabulary_is_that_of_the_data(source, tmp_path):
    config = tiny_config(source, tmp_path)
    assert are_prepared(config)
    assert chosen_model(config, {}).options.vocab_size == TINY_VOCABULARY
    assert stage_architecture(config).vocab_size == TINY_VOCABULARY
    config.model.vocab_size = 512
    assert chosen_model(config, {}).options.vocab_size == 512
    assert stage_architecture(config).vocab_size == 512
    config.model.vocab_size = None
    config.dataloader.mixture = [f"{tmp_path / 'later'}=1"]
    assert not are_prepared(config)
    assert stage_architecture(config).vocab_size == 128  # the size's own
    assert config.model.vocab_size is None


def test_weights_are_the_run_s_own_before_the_parent_s(source, tmp_path):
    config = tiny_config(source, tmp_path / "run")
    assert saved_architecture(config) == {}
    parent = write_run_of(source, tmp_path / "parent")
    write_checkpoint_of(parent, 3)
    config.checkpoint.carry.parent = str(parent)
    assert saved_architecture(config)["vocab_size"] == TINY_VOCABULARY
    own: Any = {"trainer": {"architecture": {"rope_theta": 1.0}}}
    assert saved_architecture(config, lambda: (5, own)) == {"rope_theta": 1.0}
    config.checkpoint.enable = False
    assert "vocab_size" in saved_architecture(config, lambda: (5, own))
    config.checkpoint.carry.parent = str(tmp_path / "missing")
    assert saved_architecture(config) == {}

    def fails() -> Any:
        raise UserError("no checkpoint is usable")

    config.checkpoint.enable = True
    assert saved_architecture(config, fails) == {}
