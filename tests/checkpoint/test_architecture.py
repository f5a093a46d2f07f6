"""Two records of a model, of any version, agree or are refused by name."""

import pytest

from titan_loop.checkpoint.model import check_architecture, different_options
from titan_loop.checkpoint.start_from import StartFrom, check_parent
from titan_loop.errors import UserError
from titan_loop.families.ouro.hugging_face.ouro_shape import OuroShape
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.family import decoder_config

RECORD = decoder_config(OuroOptions(rope_theta=5e4), max_seq_len=8).architecture()
FIRST_VERSION = (  # what a manifest of titan_loop 0.1 has
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "hidden_dim",
    "vocab_size",
    "exit_gate",
    "tie_weights",
    "rope_theta",
)
OLD = {name: RECORD[name] for name in FIRST_VERSION}


def test_a_record_of_an_older_version_is_that_of_the_default_model():
    assert RECORD["family"] == "ouro"
    check_architecture(OLD, RECORD)
    check_architecture(RECORD, OLD)
    assert different_options(OLD, {**RECORD, "n_layers": 4}) == {"n_layers"}
    assert OuroShape.from_architecture(OLD, recurrent_steps=4, max_positions=8).rope_theta == 5e4


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({**RECORD, "decode": True}, r"model\.decode=unknown \(checkpoint: True\)"),
        ({**OLD, "rope_theta": 1e4}, r"model\.rope_theta=50000\.0 \(checkpoint: 10000\.0\)"),
        ({**RECORD, "family": "disco"}, r"model\.family=disco is unknown"),
    ],
)
def test_an_unknown_or_other_option_is_refused(saved, message):
    with pytest.raises(UserError, match=message):
        check_architecture(saved, RECORD)
    if "rope_theta" not in message:  # a fork may have another base
        with pytest.raises(UserError, match=message):
            check_parent(saved, RECORD, StartFrom())


def test_the_export_has_no_place_for_another_option():
    with pytest.raises(UserError, match=r"model\.decode=True: the Ouro format has no place"):
        OuroShape.from_architecture({**RECORD, "decode": True}, recurrent_steps=4, max_positions=8)
