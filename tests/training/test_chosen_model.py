"""The model that a run trains, with what its options leave open."""

import pytest

from tests.support.tiny import tiny_config
from titan_loop.models.family import decoder_config, get_family
from titan_loop.plugins import names
from titan_loop.training.chosen_model import chosen_model


@pytest.mark.parametrize("name", names("families"))
def test_options_without_what_was_open_stand_for_the_same_model(source, tmp_path, name):
    family = get_family(name)
    config = tiny_config(source, tmp_path)
    config.model = family.options(size=next(iter(family.sizes)), vocab_size=512)
    chosen = chosen_model(config, {})
    again = decoder_config(chosen.options, max_seq_len=config.training.seq_len)
    assert again.architecture() == chosen.config.architecture()


def test_what_is_open_is_that_of_the_weights(source, tmp_path):
    config = tiny_config(source, tmp_path)
    for saved, base in (({}, None), ({"rope_theta": 5e5}, 5e5), ({"rope_theta": 4e5}, 4e5)):
        chosen = chosen_model(config, saved)
        assert chosen.config.architecture()["rope_theta"] == chosen.options.rope_theta
        assert base in (None, chosen.options.rope_theta)
    config.model.rope_theta = 7e5
    assert chosen_model(config, {"rope_theta": 5e5}).options.rope_theta == 7e5
