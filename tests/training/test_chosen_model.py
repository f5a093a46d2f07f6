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


def test_open_options_come_from_weights_and_data(source, tmp_path):
    config = tiny_config(source, tmp_path)
    assert chosen_model(config, {"rope_theta": 5e5}).config.architecture["rope_theta"] == 5e5
    config.model.rope_theta = 7e5
    assert chosen_model(config, {"rope_theta": 5e5}).options.rope_theta == 7e5
    assert are_prepared(config)
    assert chosen_model(config, {}).options.vocab_size == TINY_VOCABULARY
    assert stage_architecture(config).vocab_size == TINY_VOCABULARY
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
    config.checkpoint.carry.parent = str(tmp_path / "missing")

    def fails() -> Any:
        raise UserError("no checkpoint is usable")

    assert saved_architecture(config, fails) == {}
