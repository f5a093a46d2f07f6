"""Inkling's folders: what is refused, and what may be missing."""

import json

import pytest

from tests.families.ouro.hugging_face.conftest import convert
from tests.families.ouro.hugging_face.test_export import error_of


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"swa_head_dim": 8}, "swa_head_dim=8 is not supported by titan_loop; only 16"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ({"quantization_config": {"quant_method": "nvfp4"}}, "quantization_config={"),
        ({"layer_types": ["hybrid"]}, "layer_types=['hybrid'] must be 6 times hybrid or"),
        ({"loop_layer_index_end": 9}, "loop_layer_index_end=9 must lie within the layers"),
        ({"sliding_window": 9}, "sliding_window is another name of sliding_window_size"),
        ({"loop_config": {"core_end": 3}}, "model.coda_layers=3 ends at layer 3, which"),
        ({"loop_num_passes": 0}, "loop_num_passes=0 must be a positive integer"),
        ({"num_hidden_layers": 7, "layer_types": None}, "missing"),
    ],
)
def test_other_folders_are_one_line_and_nothing_is_written(
    make_run, tmp_path, capsys, changed, message
):
    out = tmp_path / "out"
    convert("export", make_run().run, "--output", out, "--to", "inkling", "--no-tokenizer")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | changed))
    assert message in error_of(capsys, "import", out, "--output", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_gate_has_no_place_in_the_format(make_run, tmp_path, capsys):
    run, out = make_run(exit_gate=True).run, tmp_path / "out"
    message = error_of(capsys, "export", run, "--output", out, "--to", "inkling")
    assert "model.exit_gate=True: the Inkling format has no place" in message
