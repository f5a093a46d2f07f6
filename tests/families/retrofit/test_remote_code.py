"""The retrofit folder's own code in transformers: logits at every R, and greedy tokens."""

import json
import shutil

import pytest
import torch

from tests.families.nanbeige.conftest import maker
from tests.families.nanbeige.test_formats import convert
from tests.families.ouro.hugging_face.test_export import error_of
from tests.families.retrofit.conftest import opened
from titan_loop.families.retrofit.model import RetrofitOptions

PARTS = {
    "identity": {"bridge": True},
    "damped": {"damping": 3},
    "both": {"bridge": True, "damping": 2},
    "dropped": {"mixer": True},
    "noisy": {"mixer": True, "start_noise": 0.5},
}


@pytest.fixture(scope="module", params=PARTS)
def exported(request, tmp_path_factory, ascii_tokenizer):
    """Return a model and the folder that it was exported to."""
    layers = {"n_layers": 4, "prelude_layers": 1, "coda_layers": 1, "recurrent_steps": 3}
    make = maker(RetrofitOptions, tmp_path_factory)
    made = make(**layers, **PARTS[request.param], rope_theta=500.0)
    folder = tmp_path_factory.mktemp("exported") / "model"
    flags = ("--to", "retrofit", "--tokenizer", ascii_tokenizer)
    convert("export", made.run, "--output", folder, *flags)
    return made.model, folder


def test_an_export_comes_back(exported, tmp_path, capsys):
    model, folder = exported
    convert("import", folder, "--output", tmp_path / "run")
    back = opened(tmp_path / "run")
    assert back.config.architecture() == model.config.architecture()
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    again = shutil.copytree(folder, tmp_path / "again")
    config = json.loads((again / "config.json").read_text())
    for wrong in ({"damping": True}, {"bridge": None}, {"start_noise": -1.0}):
        (again / "config.json").write_text(json.dumps(config | wrong))
        ((field, value),) = wrong.items()
        message = error_of(capsys, "import", again, "--output", tmp_path / "refused")
        assert f"{field}={value} must be" in message
    del config["start_noise"]  # older exports had none
    (again / "config.json").write_text(json.dumps(config))
    if config["start_at_zero"]:
        message = error_of(capsys, "import", again, "--output", tmp_path / "refused")
        assert "start_noise=None must be a number" in message
    else:
        convert("import", again, "--output", tmp_path / "old")
