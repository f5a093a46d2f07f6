"""Folders of retrofitted models of older versions, which had no noise."""

import json

import pytest

from tests.contracts.folders import write_folder
from tests.families.ouro.hugging_face.conftest import convert
from tests.families.ouro.hugging_face.test_export import error_of


@pytest.mark.parametrize("number", [0, 3], ids=["bridge", "mixer"])
def test_noise_is_read_where_the_model_has_it(tmp_path, capsys, number):
    folder = write_folder(tmp_path, "retrofit", None, number=number).folder
    config = json.loads((folder / "config.json").read_text())
    del config["start_noise"]
    (folder / "config.json").write_text(json.dumps(config))
    if config["start_at_zero"]:
        message = error_of(capsys, "import", folder, "--output", tmp_path / "refused")
        assert "start_noise=None must be a number" in message
    else:
        convert("import", folder, "--output", tmp_path / "old")
