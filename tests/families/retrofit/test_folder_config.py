"""Folders of retrofitted models: damaged fields, and folders of older versions."""

import json

import pytest

from tests.contracts.folders import write_folder
from tests.families.ouro.hugging_face.conftest import convert
from tests.families.ouro.hugging_face.test_export import error_of


@pytest.mark.parametrize("number", [0, 3], ids=["bridge", "mixer"])
def test_fields_of_the_config_are_checked(tmp_path, capsys, number):
    folder = write_folder(tmp_path, "retrofit", None, number=number).folder
    config = json.loads((folder / "config.json").read_text())
    for wrong in ({"damping": True}, {"bridge": None}, {"start_noise": -1.0}):
        (folder / "config.json").write_text(json.dumps(config | wrong))
        ((field, value),) = wrong.items()
        message = error_of(capsys, "import", folder, "--output", tmp_path / "refused")
        assert f"{field}={value} must be" in message
    del config["start_noise"]  # older exports had none
    (folder / "config.json").write_text(json.dumps(config))
    if config["start_at_zero"]:
        message = error_of(capsys, "import", folder, "--output", tmp_path / "refused")
        assert "start_noise=None must be a number" in message
    else:
        convert("import", folder, "--output", tmp_path / "old")
