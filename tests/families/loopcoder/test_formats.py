"""LoopCoder's folders: what is refused, and what they bring."""

import json

import pytest

from tests.families.ouro.hugging_face.conftest import convert
from tests.families.ouro.hugging_face.test_export import error_of


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loop_num": 3}, "loop_num=3 is not supported by titan_loop; only 2 can be imported"),
        ({"loop_window_size": 0}, "loop_window_size=0 must be a positive integer"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"is_causal": False}, "is_causal=False is not supported"),
        ({"head_dim": 8}, "head_dim=8 is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"num_hidden_layers": 1}, "unknown (model.gate_projections.1.bias"),
    ],
)
def test_other_folders_are_one_line_and_nothing_is_written(
    make_run, tmp_path, capsys, changed, message
):
    out = tmp_path / "out"
    convert("export", make_run(recurrent_steps=2).run, "--output", out, "--to", "loopcoder",
            "--no-tokenizer")  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    assert (out / "configuration_iquestloopcoder.py").exists()
    (out / "config.json").write_text(json.dumps(config | changed))
    assert message in error_of(capsys, "import", out, "--output", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_defaults_of_the_released_class_hold_where_fields_are_missing(make_run, tmp_path, capsys):
    out = tmp_path / "out"
    made = make_run(recurrent_steps=2)
    convert("export", made.run, "--output", out, "--to", "loopcoder", "--no-tokenizer")
    config = json.loads((out / "config.json").read_text())
    for name in ("loop_num", "loop_window_size"):
        del config[name]
    (out / "config.json").write_text(json.dumps(config))
    convert("import", out, "--output", tmp_path / "back")
    recorded = json.loads((tmp_path / "back" / "config.json").read_text())["model"]
    assert (recorded["recurrent_steps"], recorded["loop_window"]) == (2, 64)


@pytest.mark.parametrize(
    ("options", "flags", "message"),
    [
        ({"recurrent_steps": 3}, (), "--recurrent-steps=3: programs that read the LoopCoder"),
        ({}, ("--recurrent-steps", 4), "--recurrent-steps=4: programs that read the LoopCoder"),
        ({"exit_gate": True}, (), "model.exit_gate=True: the LoopCoder format has no place"),
        ({"norm_placement": "every_step"}, (), "model.norm_placement=every_step: the LoopCoder"),
    ],
)
def test_models_that_the_format_cannot_hold_are_one_line(
    make_run, tmp_path, capsys, options, flags, message
):
    run = make_run(**{"recurrent_steps": 2, **options}).run
    out = tmp_path / "out"
    arguments = ("export", run, "--output", out, "--to", "loopcoder", *flags)
    assert message in error_of(capsys, *arguments)
    assert not out.exists()
