"""Exported folders: their config, tensors, tokenizer and card, and exports that fail."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.families.ouro.hugging_face.conftest import (
    STEP,
    TOKENS,
    VOCABULARY,
    WINDOW,
    Exported,
    convert,
    convert_killed,
    random_model,
    write_run,
    write_source,
)
from tests.families.ouro.hugging_face.reference import run_reference
from tests.support.command_lines import refused
from tests.support.failing_disk import largest_file
from titan_loop.checkpoint.manifest import reference, write_manifest
from titan_loop.families.ouro.hugging_face.ouro_shape import OuroShape
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.formats import model_folder
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import write_json

# fp32 against float64 through 2 layers and 3 steps, at states of size 1.
TOLERANCE = {"atol": 5e-5, "rtol": 1e-5}

OURO_1_4B = OuroShape(
    dim=2048, n_layers=24, n_heads=16, n_kv_heads=16, hidden_dim=5632, vocab_size=49_152,
    tie_weights=False, rope_theta=1e6, recurrent_steps=4, max_positions=65_536,
)  # fmt: skip


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 2) -> str:
    """Return the one line that a failing `convert` prints."""
    return refused(capsys, "convert", *arguments, code=code)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize(
    ("n_layers", "tensors", "parameters"), [(24, 269, 1_434_652_673), (48, 533, 2_667_974_657)]
)
def test_the_released_models_have_as_many_tensors_and_parameters(n_layers, tensors, parameters):
    shapes = replace(OURO_1_4B, n_layers=n_layers).tensor_shapes()
    assert len(shapes) == tensors
    assert sum(prod(shape) for shape in shapes.values()) == parameters


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_the_config_is_the_released_ones_and_says_what_is_not_like_them(plain, grouped):
    assert len(tensors_of(plain.folder)) == 11 * 2 + 5
    config = config_of(plain.folder)
    assert config["architectures"] == ["OuroForCausalLM"]
    assert (config["model_type"], config["early_exit_threshold"]) == ("ouro", 1.0)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (VOCABULARY, WINDOW)
    assert (config["total_ut_steps"], config["rope_theta"]) == (3, 10_000.0)
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 0)
    config = config_of(grouped.folder)
    assert config["num_key_value_heads"] == 2
    assert config["tie_word_embeddings"]
    assert config["eos_token_id"] == [2, 0]


def test_shards_are_no_larger_than_asked(grouped: Exported):
    sizes = [path.stat().st_size for path in grouped.folder.glob("*.safetensors")]
    assert len(sizes) > 3
    assert max(sizes) < 1e5 + 4096  # the header


def test_bf16_rounds_to_nearest_even(plain: Exported, tmp_path: Path):
    tokenizer = plain.folder / "tokenizer.json"
    arguments = ("--output", tmp_path / "bf16", "--tokenizer", tokenizer, "--dtype", "bfloat16")
    convert("export", plain.run, *arguments)
    assert config_of(tmp_path / "bf16")["torch_dtype"] == "bfloat16"
    for name, tensor in tensors_of(tmp_path / "bf16").items():
        wide = plain.model.state_dict()[OURO_1_4B.parameter_name(name)]
        bits = wide.view(torch.int32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        assert torch.equal(tensor.view(torch.int16), bits.to(torch.int16)), name


@pytest.mark.parametrize("kind", ["plain", "grouped"])
def test_our_model_is_the_reference_at_every_step(request, kind):
    exported: Exported = request.getfixturevalue(kind)
    ids = torch.randint(3, VOCABULARY, (1, 17), generator=torch.Generator().manual_seed(0))
    reference = run_reference(exported.folder, ids[0].tolist())
    with torch.no_grad():
        ours = exported.model(ids)
        logits = [exported.model.readout(hidden_BLD) for hidden_BLD in ours.hidden_RBLD]
    found = [[each[0] for each in part] for part in (*ours[:2], logits)]
    wanted = [[each.float() for each in part] for part in reference]
    torch.testing.assert_close(found, wanted, **TOLERANCE)


def test_the_card_has_no_folder_of_this_machine_and_counts_all_stages(tokenizer_file, tmp_path):
    options = OuroOptions(vocab_size=VOCABULARY)
    model = random_model(options)
    first = write_run(tmp_path / "secret" / "1a", options, model)
    second = write_run(tmp_path / "secret" / "1b", options, model)
    config = RunDirectory(tmp_path / "secret" / "1b").read_config()
    config["checkpoint"]["carry"] = {"parent": str(first.parent.parent)}
    write_json(RunDirectory(tmp_path / "secret" / "1b").config_json, config)
    manifest = json.loads((second / "manifest.json").read_text())
    manifest["lineage"]["origin"] = reference(first)
    manifest["lineage"]["imported_from"] = "/home/somebody/Ouro-1.4B"
    write_manifest(second, {k: v for k, v in manifest.items() if k != "sha256"})
    convert("export", second, "--output", tmp_path / "out", "--tokenizer", tokenizer_file)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{2 * TOKENS:,} tokens in all stages, {STEP} steps in the last" in card
    lineage = json.loads(card.split("## Lineage\n")[1])["lineage"]
    assert lineage["origin"]["path"] == f"1a/checkpoints/step-{STEP}"
    assert lineage["imported_from"] == "Ouro-1.4B"
    assert "secret" not in card


def test_the_tokenizer_is_that_of_the_training_data(
    plain, tmp_path, capsys, tokenizer_file, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_source(Path("sources/my"), tokenizer_file, eos_id=1)
    options = OuroOptions(vocab_size=VOCABULARY + 1000)
    write_run(Path("run"), options, random_model(options), mixture=["sources/my=1"])
    convert("export", "run", "--output", "out")  # known to be right, so padding may be wide
    assert Path("out/tokenizer.json").read_bytes() == tokenizer_file.read_bytes()
    assert json.loads(Path("out/config.json").read_text())["eos_token_id"] == 1
    convert("export", "run", "--output", "other-eos", "--eos-token", "<|endoftext|>")
    assert json.loads(Path("other-eos/config.json").read_text())["eos_token_id"] == 0
    tokenizer = json.loads(tokenizer_file.read_text())
    Path("mine.json").write_text(json.dumps(tokenizer | {"normalizer": {"type": "NFC"}}))
    for arguments in (["--tokenizer", "mine.json"], []):
        assert "is not the one" in error_of(
            capsys, "export", "run", "--output", "refused", *arguments
        )
        Path("sources/my/tokenizer.json").write_text(Path("mine.json").read_text())


def test_a_model_trained_on_conversations_gets_a_chat_template(
    tmp_path, tokenizer_file, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_source(Path("prose"), tokenizer_file, eos_id=0)
    write_source(Path("chats"), tokenizer_file, eos_id=0, chat=True)
    options = OuroOptions(vocab_size=VOCABULARY)
    write_run(Path("run"), options, random_model(options), mixture=["prose=1", "chats=1"])

    def ends(output: str) -> tuple:
        generation = json.loads(Path(output, "generation_config.json").read_text())
        config = json.loads(Path(output, "config.json").read_text())
        has_template = Path(output, "chat_template.jinja").exists()
        return has_template, config["eos_token_id"], generation["eos_token_id"]

    convert("export", "run", "--output", "chat")
    assert ends("chat") == (True, [2, 0], [2, 0])
    convert("export", "run", "--output", "plain", "--no-chatml")
    assert ends("plain") == (False, 0, 0)


def test_wrong_arguments_are_one_line(plain, tmp_path, capsys, tokenizer_file):
    def error(*flags: object, run: Path = plain.run, output: Path = tmp_path / "out") -> str:
        tokenizer = () if "--tokenizer" in flags else ("--tokenizer", tokenizer_file)
        return error_of(capsys, "export", run, "--output", output, *tokenizer, *flags)

    assert "has no manifest.json" in error(run=tmp_path)
    assert "is not empty; choose a new folder" in error(output=plain.folder)
    assert "is a file; choose a new folder" in error(output=tokenizer_file)
    assert "cannot be written (Not a directory)" in error(output=tokenizer_file / "in" / "a file")
    assert "--max-shard-gigabytes=0.0 must be a number above 0" in error("--max-shard-gigabytes", 0)
    assert "invalid choice 'int2' for argument '--dtype'" in error("--dtype", "int2")
    assert "has no token '<eos>'; name it with --eos-token" in error("--eos-token", "<eos>")
    assert "is not a file" in error("--tokenizer", tmp_path / "none.json")
    (tmp_path / "empty.json").write_text("{}")
    assert "is not a tokenizer.json" in error("--tokenizer", tmp_path / "empty.json")
    text = json.loads(tokenizer_file.read_text())
    text["added_tokens"] = [t for t in text["added_tokens"] if t["content"] != "<|im_end|>"]
    (tmp_path / "base.json").write_text(json.dumps(text).replace("<|im_end|>", "<|else|>"))
    without = ("--tokenizer", tmp_path / "base.json", "--chatml")
    assert "has no token '<|im_end|>'; use --no-chatml" in error(*without)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_model_without_a_gate_gets_one_that_never_exits_early(tmp_path, tokenizer_file):
    options = OuroOptions(vocab_size=VOCABULARY, n_layers=1, exit_gate=False)
    ours = random_model(options)
    write_run(tmp_path / "run", options, ours)
    folder = tmp_path / "out"
    convert("export", tmp_path / "run", "--output", folder, "--tokenizer", tokenizer_file)
    assert "trained without the gate" in (folder / "README.md").read_text()
    ids = torch.randint(3, VOCABULARY, (1, 17), generator=torch.Generator().manual_seed(0))
    theirs = run_reference(folder, ids[0].tolist())
    with torch.no_grad():
        last_BLD = ours(ids).hidden_RBLD[-1]
    torch.testing.assert_close(last_BLD[0], theirs.hidden[-1].float(), **TOLERANCE)
    assert max(logit.sigmoid().max() for logit in theirs.exit_logits) < 1e-12


def test_a_killed_export_leaves_nothing_that_looks_complete(plain, tmp_path, capsys):
    output = tmp_path / "out"
    tokenizer = plain.folder / "tokenizer.json"
    arguments = ("export", plain.run, "--output", output, "--tokenizer", tokenizer)
    convert_killed(write_json, model_folder, *arguments)  # all is there but config.json
    assert not output.exists()
    (left,) = tmp_path.iterdir()
    assert not (left / "config.json").exists()
    assert "export or download never finished" in error_of(
        capsys, "import", left, "--output", tmp_path / "run"
    )
    convert(*arguments)  # the next attempt clears it away
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("direction", ["export", "import"])
def test_a_disk_that_fills_up_is_one_line(plain, tmp_path, capsys, direction):
    tokenizer = ("--chatml", "--tokenizer", plain.folder / "tokenizer.json")
    words = {"export": (plain.run, *tokenizer), "import": (plain.folder,)}[direction]
    with largest_file(50_000):
        message = error_of(capsys, direction, *words, "--output", tmp_path / "out", code=1)
    assert "could not be finished, and nothing is left of it" in message
    assert not list(tmp_path.iterdir())
