"""Folders of the Ouro format, from anywhere, become runs; anything odd about one is one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families.ouro.hugging_face.conftest import Exported, convert, convert_killed
from tests.families.ouro.hugging_face.test_export import OURO_1_4B, error_of, tensors_of
from titan_loop.checkpoint import tensors
from titan_loop.checkpoint.manifest import write_manifest
from titan_loop.checkpoint.safetensors_files import INDEX, SINGLE
from titan_loop.inference.loading import load_checkpoint, load_matching_tokenizer, text_ends
from titan_loop.models.decoder import LoopDecoder
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.text.chat_encoding import ChatEncoder
from titan_loop.text.conversation import Conversation, Turn


def load_run(run: Path) -> LoopDecoder:
    """Load as every command does that takes a checkpoint, its hashes verified."""
    loaded = load_checkpoint(run)
    assert loaded.recurrent_steps == loaded.model.recurrent_steps
    return loaded.model


def assert_same(left: LoopDecoder, right: LoopDecoder) -> None:
    torch.testing.assert_close(left.state_dict(), right.state_dict(), rtol=0, atol=0)
    assert left.recurrent_steps == right.recurrent_steps


def test_fp16_weights_are_kept_exactly(plain, edited, tmp_path):
    def narrow(weights: dict[str, Any]) -> None:
        weights.update({name: tensor.half() for name, tensor in weights.items()})
        # Subnormal and largest values, which bf16 could not hold.
        weights["model.norm.weight"][:3] = torch.tensor([2.0**-24, 65504.0, 1 + 2.0**-10])

    folder = edited(tensors=narrow)
    convert("import", folder, "--output", tmp_path / "run")
    state = load_run(tmp_path / "run").state_dict()
    for name, tensor in tensors_of(folder).items():
        assert tensor.dtype == torch.float16
        ours = state[OURO_1_4B.parameter_name(name)]
        assert torch.equal(ours.double(), tensor.double()), name
    assert state["norm.weight"][0] == 2.0**-24


def test_a_killed_import_leaves_no_run(plain, tmp_path, capsys):
    arguments = ("import", plain.folder, "--output", tmp_path / "run")
    convert_killed(write_manifest, tensors, *arguments)  # all tensors are there, not committed
    (left,) = tmp_path.iterdir()
    assert left.name == ".run.unfinished"
    message = error_of(capsys, "export", left, "--output", tmp_path / "out")
    assert "has no manifest.json" in message
    convert(*arguments)  # the next attempt clears it away
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert_same(load_run(tmp_path / "run"), plain.model)


TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")


def test_a_chat_stays_one(grouped, tmp_path):
    convert("import", grouped.folder, "--output", tmp_path / "run")
    convert("export", tmp_path / "run", "--output", tmp_path / "again")
    for name in (*TEXT_FILES, "chat_template.jinja"):
        assert (tmp_path / "again" / name).read_bytes() == (grouped.folder / name).read_bytes()
    convert("export", tmp_path / "run", "--output", tmp_path / "prose", "--no-chatml")
    assert not (tmp_path / "prose" / "chat_template.jinja").exists()
    assert json.loads((tmp_path / "prose" / "config.json").read_text())["eos_token_id"] == 0


NAMED = [
    {"name": "tool_use", "template": "{{ tools }}"},
    {"name": "default", "template": "{{ messages }}\r\n"},
]


@pytest.mark.parametrize("template", ["{{ messages }}\r\n", NAMED], ids=["one", "named"])
def test_a_template_in_the_tokenizer_s_settings_ends_turns_with_its_token(
    edited, tmp_path, template
):
    folder = edited()  # whose config.json names the end of a document, as released ones do
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"chat_template": template, "eos_token": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    convert("import", folder, "--output", tmp_path / "run")
    convert("export", tmp_path / "run", "--output", tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, [2, 0])
    assert (tmp_path / "again" / "chat_template.jinja").read_bytes() == b"{{ messages }}\r\n"


OWN_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"""


def test_a_folder_s_own_template_and_all_its_end_tokens_are_used_and_come_back(edited, tmp_path):
    folder = edited()
    (folder / "chat_template.jinja").write_text(OWN_TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0, 1]}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    convert("import", folder, "--output", tmp_path / "run")
    loaded = load_checkpoint(tmp_path / "run")
    tokenizer = load_matching_tokenizer(loaded)
    assert text_ends(loaded, tokenizer).stop_tokens == {0, 1, 2}
    template = loaded.run.text_format(tokenizer).template
    question = Conversation((Turn("system", "Count."), Turn("user", "1 2 3")))
    ids = ChatEncoder(tokenizer, template).prompt(question).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>[system] Count.<|im_end|>\n[user] 1 2 3<|im_end|>\n[assistant] "
    )
    assert (ids[0], ids.count(2)) == (1, 2)
    convert("export", tmp_path / "run", "--output", tmp_path / "again")
    for name in ("generation_config.json", "config.json"):
        again = json.loads((tmp_path / "again" / name).read_text())
        assert again["eos_token_id"] == [2, 0, 1]
    assert (tmp_path / "again" / "chat_template.jinja").read_text() == OWN_TEMPLATE
    again = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())
    assert again["bos_token"] == "<|im_start|>"


Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def edited(plain: Exported, tmp_path: Path) -> Callable[..., Path]:
    """Return `edit(config=…, tensors=…)`, a copy of the plain folder with changes."""

    def edit(*, config: Edit | None = None, tensors: Edit | None = None) -> Path:
        folder = tmp_path / "edited"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(plain.folder, folder)
        if config is not None:
            content = json.loads((folder / "config.json").read_text())
            config(content)
            (folder / "config.json").write_text(json.dumps(content))
        if tensors is not None:
            weights = load_file(folder / "model.safetensors")
            tensors(weights)
            save_file(weights, folder / "model.safetensors")
        return folder

    return edit


def set_to(**fields: Any) -> Edit:
    return lambda content: content.update(fields)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1000000, "rope_parameters": {"rope_theta": 1e6, "type": "default"}},
    ],
    ids=["released", "transformers 5", "both"],
)
def test_both_spellings_of_the_rope_base(edited, tmp_path, rope):
    convert("import", edited(config=set_to(**rope)), "--output", tmp_path / "run")
    assert RunDirectory(tmp_path / "run").read_config()["model"]["rope_theta"] == 1e6


def test_a_released_config_without_our_extras_is_enough(edited, tmp_path, plain):
    optional = ("head_dim", "layer_types", "num_key_value_heads", "rope_scaling", "torch_dtype")

    def strip(config: dict[str, Any]) -> None:
        for name in (*optional, "max_window_layers", "sliding_window", "early_exit_threshold"):
            del config[name]
        config["early_exit_step"] = None

    folder = edited(config=strip)
    (folder / "tokenizer.json").unlink()
    convert("import", folder, "--output", tmp_path / "run")
    assert_same(load_run(tmp_path / "run"), plain.model)


GATE, NORM = "model.early_exit_gate.bias", "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(GATE), f"1 missing ({GATE})"),
        (set_to(**{"model.rotary": torch.zeros(2)}), "1 unknown (model.rotary)"),
        (set_to(**{NORM: torch.zeros(1, 64)}), f"{NORM} has shape (1, 64), config.json says (64,)"),
        (set_to(**{NORM: torch.zeros(64).char()}), f"{NORM} is I8; only F32, BF16 and F16"),
        (
            lambda tensors: tensors.pop("lm_head.weight"),
            "lm_head.weight is missing, but config.json has tie_word_embeddings=false",
        ),
    ],
)
def test_other_tensors_are_one_line(edited, tmp_path, capsys, change, message):
    folder = edited(tensors=change)
    assert message in error_of(capsys, "import", folder, "--output", tmp_path / "run")


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "config.json", "tokenizer.json", "model.safetensors"]
)
def test_a_link_out_of_the_folder_is_refused(edited, tmp_path, capsys, name):
    folder = edited()
    if name == "chat_template.jinja":
        (folder / name).write_text("a secret")
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    message = error_of(capsys, "import", folder, "--output", tmp_path / "run")
    assert f"{folder / name} is a link out of its folder, to {tmp_path / 'elsewhere'}" in message
    assert not (tmp_path / "run").exists()


def test_links_within_the_hub_s_cache_are_followed(edited, tmp_path):
    folder, cache = edited(), tmp_path / "hub" / "models--a--b"
    snapshot = cache / "snapshots" / "c0ffee"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(folder.iterdir()):
        file.rename(cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    convert("import", snapshot, "--output", tmp_path / "run")


def test_files_are_read_as_transformers_reads_them(grouped, tmp_path, capsys):
    folder = shutil.copytree(grouped.folder, tmp_path / "folder")
    whole = tensors_of(folder)
    shard = next(folder.glob("model-*.safetensors"))
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(whole | buffer, folder / "model.safetensors")  # beside the index of older shards
    convert("import", folder, "--output", tmp_path / "run")
    assert_same(load_run(tmp_path / "run"), grouped.model)
    (folder / "tokenizer.json").unlink()
    convert("import", folder, "--output", tmp_path / "without")
    for name in ("tokenizer.model", "vocab.json"):
        (folder / name).touch()
        message = error_of(capsys, "import", folder, "--output", tmp_path / "refused")
        assert f"has {name} but no tokenizer.json" in message
        (folder / name).unlink()


def cut(name: str, keep: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def listed(**names: str) -> Callable[[Path], object]:
    """Have the index list the norm under these names alone."""

    def change(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        del content["weight_map"][NORM]
        content["weight_map"] |= names
        (folder / INDEX).write_text(json.dumps(content))

    return change


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("plain", lambda at: (at / "config.json").unlink(), "export or download never finished"),
        ("plain", cut("config.json", 20), "config.json is damaged"),
        ("plain", lambda at: (at / SINGLE).rename(at / "pytorch_model.bin"), "only safetensors"),
        *(
            ("plain", cut(SINGLE, keep), f"{SINGLE} is damaged or incomplete")
            for keep in (0, 5, 100, -100_000, -1)
        ),
        ("grouped", lambda at: min(at.glob("*.safetensors")).unlink(), ".safetensors is missing"),
        ("grouped", lambda at: (at / INDEX).write_text('{"weight_map": 3}'), "has no weight_map"),
        ("grouped", listed(), f"disagree about {NORM}"),
        ("grouped", listed(**{NORM: "../other.safetensors"}), "may lie outside its folder"),
    ],
)
def test_an_unfinished_folder_is_one_line(request, tmp_path, capsys, kind, change, message):
    folder = shutil.copytree(request.getfixturevalue(kind).folder, tmp_path / "broken")
    change(folder)
    assert message in error_of(capsys, "import", folder, "--output", tmp_path / "run")
    assert not (tmp_path / "run").exists()
