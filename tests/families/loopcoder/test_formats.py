"""LoopCoder's folders: what is refused, and what they bring."""

import json

from tests.families.ouro.hugging_face.conftest import convert


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
