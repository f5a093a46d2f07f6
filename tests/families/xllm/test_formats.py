"""Released checkpoints, in their own layout, and the models that they become."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from tests.contracts.folders import opened
from tests.families.ouro.hugging_face.conftest import convert
from tests.families.xllm.reference import fields, logits, random_weights
from titan_loop.errors import UserError
from titan_loop.families.xllm.formats import XllmShape
from titan_loop.families.xllm.model import XllmOptions
from titan_loop.families.xllm.start_state import fixed_noise
from titan_loop.models.family import decoder_config
from titan_loop.runs.saved_run import SavedRun

TOKENS = torch.arange(12) * 5 % 64
CLOSE = 2e-5  # the model in float64, its rotations and its noise in fp32

SPLIT = {
    "huginn_hierarchical_state": "split_hl",
    "huginn_hierarchical_h_cycles": 2,
    "huginn_hierarchical_l_cycles": 3,
}
WHOLE = {"arch": "transformer", "loop_input_injection": "diagonal"}
MODELS = {
    "diagonal": fields(),
    "zero": fields(huginn_state_init="zero"),
    "parcae": fields(huginn_prelude_norm="rms"),
    "orthogonal": fields(huginn_prelude_orthogonal=True),
    "linear": fields(
        huginn_input_injection="linear", huginn_recurrent_exit_norm="parameterless_rms"
    ),
    "middle": fields(huginn_state_init="input", huginn_input_injection="none"),
    "shared": fields(**{**SPLIT, "huginn_hierarchical_state": "shared_hl"}),
    "split": fields(**SPLIT, huginn_split_module_repeats=2),
    "ouro": fields(arch="transformer", loop_times=2),
    "ouro injected": fields(**WHOLE, loop_times=2),
    "unrolled": fields(
        arch="transformer",
        loop_times=1,
        num_layers=8,
        dense_prelude_input_injection="diagonal",
        dense_prelude_input_layers="2,4",
        dense_prelude_source_layer=1,
    ),
}
NANBEIGE = {"middle", "ouro"}


def imported(folder, run):
    """Return the model of an imported folder, in float64."""
    convert("import", folder, "--output", run)
    return SavedRun.open(run), opened(run).double()


def check_answers(folder, weights, config, family, run) -> None:
    """Compare logits of an imported folder with those of the equations."""
    saved, model = imported(folder, run)
    assert saved.model_options.family == family
    rounded = {key: tensor.to(torch.bfloat16).double() for key, tensor in weights.items()}
    start = fixed_noise(torch.arange(len(TOKENS))[None], config["model_dim"])[0].double()
    with torch.no_grad():
        got = model.readout(model(TOKENS[None]).hidden_RBLD[-1])[0]
    torch.testing.assert_close(got, logits(rounded, config, TOKENS, start), atol=CLOSE, rtol=0)


def export_again(folder, to, tmp_path) -> Path:
    """Import a folder, export it, and compare the weights of both; return the second folder."""
    out = tmp_path / "out"
    _, first = imported(folder, tmp_path / "run")
    flags = ("--to", to, "--no-tokenizer", "--dtype", "bfloat16")
    convert("export", tmp_path / "run", "--output", out, *flags)
    _, second = imported(out, tmp_path / "again")
    found, want = second.state_dict(), first.state_dict()
    torch.testing.assert_close(found, want, atol=2**-8, rtol=2**-8)
    return out


@pytest.mark.parametrize("name", MODELS)
def test_an_imported_model_answers_as_the_equations(name, write_released, tmp_path):
    config = MODELS[name]
    weights = random_weights(config)
    family = "nanbeige" if name in NANBEIGE else "xllm"
    check_answers(write_released(config, weights), weights, config, family, tmp_path / "run")


@pytest.mark.parametrize("name", sorted(MODELS.keys() - NANBEIGE))
def test_export_writes_their_layout_again(name, write_released, tmp_path):
    config = MODELS[name]
    out = export_again(write_released(config, random_weights(config)), "xllm", tmp_path)
    written = json.loads((out / "config.json").read_text())["model"]
    want = XllmShape.from_config({"model": config})
    assert XllmShape.from_config({"model": written}) == want
    manifest = json.loads((out / "artifact_manifest.json").read_text())
    listed = {record["path"]: record for record in manifest["files"]}
    found = {str(f.relative_to(out)) for f in out.rglob("*") if f.is_file()}
    assert found == listed.keys() | {"artifact_manifest.json"}
    for path, record in listed.items():
        content = (out / path).read_bytes()
        assert record["sha256"] == hashlib.sha256(content).hexdigest()
        assert record["size_bytes"] == len(content)
    digest = manifest.pop("manifest_sha256")
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert digest == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("places", "layers", "source", "found"),
    [
        ("2,4", 8, 1, (2, 2, 2)),
        ("2,4", 6, 1, (2, 0, 2)),
        ("1,2,3", 4, 0, (1, 0, 3)),
        ("3", 8, 2, (3, 0, 1)),
        ("2,4", 5, 1, None),
        ("2,4", 8, 2, None),
        ("2,5", 7, 1, None),
    ],
)
def test_untied_steps_are_equal_parts_after_the_source(places, layers, source, found):
    given = {
        "num_layers": layers,
        "dense_prelude_input_layers": places,
        "dense_prelude_source_layer": source,
    }
    config = {"model": MODELS["unrolled"] | given}
    if found is None:
        with pytest.raises(UserError, match=r"dense_prelude_input_layers=.*equal parts after"):
            XllmShape.from_config(config)
        return
    shape = XllmShape.from_config(config)
    assert (shape.prelude_layers, shape.coda_layers, shape.untied_steps) == found


def test_combinations_that_their_classes_lack_are_refused():
    def shape_of(steps: int, **changed):
        options = XllmOptions(size="debugmodel", **changed)
        architecture = decoder_config(options, max_seq_len=16).architecture
        return XllmShape.from_architecture(architecture, recurrent_steps=steps, max_positions=8192)

    whole = {"n_layers": 2, "prelude_layers": 0, "coda_layers": 0}
    plain = {"injection": "diagonal", "start_state": "input"}
    assert shape_of(2, **whole, **plain).recurrent_steps == 2
    for wrong in ({"injection": "linear"}, {"start_state": "zero"}, {"state_norm": True}):
        with pytest.raises(UserError, match="no place for a loop over the whole stack"):
            shape_of(2, **whole, **plain | wrong)
        assert shape_of(2, **plain | wrong).prelude_layers
    for passes in ({}, {"states": "shared"}, {**whole, **plain}, {"untied_steps": 2, **plain}):
        steps = 1 if "untied_steps" in passes else 2
        with pytest.raises(UserError, match=r"core_passes=2 with .* only with model.states=split"):
            shape_of(steps, core_passes=2, **passes)
    assert shape_of(2, core_passes=2, states="split").core_passes == 2
    for loop in (
        {"injection": "linear"},
        {"injection": "orthogonal"},
        {"prelude_norm": True},
        {"state_norm": True},
    ):
        with pytest.raises(UserError, match=r"model.states=shared: .* only with model.states=one"):
            shape_of(2, states="shared", **loop)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arch": "gekko"}, "model.arch='gekko' is not supported by titan_loop"),
        ({"num_experts": 25}, "model.num_experts=25 is not supported by titan_loop"),
        ({"rope_head_dim": 4}, "model.rope_head_dim=4 is not"),
        ({**WHOLE, "loop_times": 1, "loop_start_layer": 1}, "model.loop_start_layer=1 is not"),
    ],
)
def test_what_cannot_be_computed_is_refused(changed, message):
    with pytest.raises(UserError, match=message):
        XllmShape.from_config({"model": fields(**changed)})
