"""What holds for every exported folder, whatever its format."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import titan_loop
from tests.contracts.folders import (
    FOLDERS,
    IN_TRANSFORMERS,
    MODELS,
    OWN_CODE,
    Written,
    opened,
    write_folder,
    write_model,
)
from tests.families.ouro.hugging_face.conftest import convert
from tests.families.ouro.hugging_face.test_export import error_of
from titan_loop.formats.format import get_format
from titan_loop.plugins import names
from titan_loop.runs.saved_run import SavedRun
from titan_loop.text.tokenizer import same_ids

NOT_OURS = {"xllm", "xllm-moe", "onnx"}  # the first two's code unties, the last has no tensors


def test_every_folder_has_a_case():
    folders = {name for name in names("formats") if "q8_0" not in get_format(name).dtypes}
    assert FOLDERS.keys() == folders - NOT_OURS


@pytest.mark.parametrize(
    ("name", "number"), [pair for pair in MODELS if FOLDERS[pair[0]].comes_back]
)
def test_an_export_comes_back_bit_by_bit(tmp_path, tokenizer_file, name, number):
    shards = ("--max-shard-gigabytes", "1e-4")
    written = write_folder(tmp_path, name, tokenizer_file, *shards, number=number)
    back, again = tmp_path / "back", tmp_path / "again"
    convert("import", written.folder, "--output", back)
    loaded = titan_loop.load(written.folder)
    assert loaded.recurrent_steps == written.model.recurrent_steps
    for state in (opened(back).state_dict(), loaded.model.state_dict()):
        torch.testing.assert_close(state, written.model.state_dict(), rtol=0, atol=0)
    before, after = (
        SavedRun.open(run).checkpoint().manifest["trainer"] for run in (written.run, back)
    )
    for key in ("architecture", "recurrent_steps"):
        assert after[key] == before[key]
    # The tokenizer is known from the import.
    convert("export", back, "--to", name, "--output", again, *shards)
    for file in (*written.folder.glob("*.safetensors"), written.folder / "config.json"):
        assert file.read_bytes() == (again / file.name).read_bytes()


@pytest.mark.parametrize("name", [name for name, folder in FOLDERS.items() if folder.ties])
def test_a_tied_matrix_is_written_once(tmp_path, name):
    written = write_folder(tmp_path, name, None, tie_weights=True)
    tensors = load_file(written.folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert json.loads((written.folder / "config.json").read_text())["tie_word_embeddings"]
    assert tensors["model.embed_tokens.weight"].shape == (300, written.model.config.dim)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tokenizer_file) -> Callable[[str], Path]:
    """Return a function that gives a folder of a format, written once."""
    return cache(
        lambda name: write_folder(tmp_path_factory.mktemp(name), name, tokenizer_file).folder
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [(name, *row) for name, folder in FOLDERS.items() for row in folder.refused],
)
def test_another_config_is_one_line_and_nothing_is_written(
    exported, tmp_path, capsys, name, change, message
):
    folder = shutil.copytree(exported(name), tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert message in error_of(capsys, "import", folder, "--output", tmp_path / "back")
    assert [*tmp_path.iterdir()] == [folder]


@pytest.mark.parametrize(
    ("name", "options", "flags", "message"),
    [(name, *row) for name, folder in FOLDERS.items() for row in folder.unfit],
)
def test_a_model_that_the_format_cannot_hold_is_one_line_and_nothing_is_written(
    tmp_path, tokenizer_file, capsys, name, options, flags, message
):
    run = tmp_path / "run"
    write_model(run, name, **options)
    where = ("--to", name, "--output", tmp_path / "out", "--tokenizer", tokenizer_file)
    assert message in error_of(capsys, "export", run, *where, *flags)
    assert [*tmp_path.iterdir()] == [run]


@pytest.fixture(scope="module", params=IN_TRANSFORMERS)
def folder(request, tmp_path_factory, tokenizer_file):
    """Return the name of a format and a folder of it, of a model trained on conversations."""
    place = tmp_path_factory.mktemp(request.param)
    written = write_folder(place, request.param, tokenizer_file, "--chatml")
    return request.param, written.folder


@pytest.fixture(params=OWN_CODE)
def load(request, tmp_path, tokenizer_file):
    """Return a function that loads a folder with code of ours."""
    written = write_folder(tmp_path, request.param, tokenizer_file)

    def loaded(**settings):
        import transformers  # pyright: ignore[reportMissingImports]

        return transformers.AutoModelForCausalLM.from_pretrained(
            written.folder, trust_remote_code=True, **settings
        )

    return loaded


@pytest.fixture(
    scope="module",
    params=[pair for pair in MODELS if pair[0] in IN_TRANSFORMERS],
    ids=lambda pair: f"{pair[0]}-{pair[1]}",
)
def written(request, tmp_path_factory, tokenizer_file) -> Written:
    """Return every model of every format that transformers runs."""
    name, number = request.param
    place = tmp_path_factory.mktemp(name)
    return write_folder(place, name, tokenizer_file, number=number)


IDS = torch.arange(40)[None] * 7 % 300
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
CLOSE = 1e-5  # fp32 sums in another order


def load_whole(library, folder: Path):
    """Return the model, every tensor of which must come from the folder."""
    config = json.loads((folder / "config.json").read_text())
    # Gemma 2's cap has no effect with version 4's own SDPA, as its documentation says.
    eager = {"attn_implementation": "eager"} if config.get("attn_logit_softcapping") else {}
    model, report = library.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **eager
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@torch.no_grad()
def test_logits_and_greedy_tokens_are_ours(transformers, written):
    model, _, folder = written
    if int(transformers.__version__.split(".")[0]) < (FOLDERS[folder.name].transformers or 0):
        return  # which has no such model
    theirs = load_whole(transformers, folder)

    def ours(ids):
        columns = {"prefix": torch.ones_like(ids, dtype=torch.bool)} if prefix else None
        return model.readout(model(ids, columns=columns).hidden_RBLD[-1])

    prefix = getattr(model.config, "prefix_lm", False)
    inputs = {"token_type_ids": torch.ones_like(IDS)} if prefix else {}
    torch.testing.assert_close(theirs(IDS, **inputs).logits, ours(IDS), atol=CLOSE, rtol=0)
    if prefix:
        return  # what it says is not a prefix
    prompt = IDS[:, 1:7]  # token 0 is padding
    caches = (
        [{}, {"cache_implementation": "static"}] if "auto_map" in theirs.config.to_dict() else [{}]
    )
    wanted = prompt
    for _ in range(8):
        wanted = torch.cat([wanted, ours(wanted)[:, -1:].argmax(-1)], dim=1)
    for kept in caches:
        mask = torch.ones_like(prompt)
        found = theirs.generate(prompt, attention_mask=mask, **kept, **GREEDY)
        assert found.tolist() == wanted.tolist()


@torch.no_grad()
def test_padding_on_the_left_changes_no_answer(transformers, written):
    """Also where its own rows see no key, which SDPA's boolean masks say."""
    _, _, folder = written
    if folder.name not in OWN_CODE:
        return
    theirs = load_whole(transformers, folder)
    mask = (torch.arange(24) >= 4).long()[None]
    alone = theirs.generate(IDS[:, 5:25], attention_mask=mask[:, 4:], **GREEDY)
    padded = theirs.generate(IDS[:, 1:25], attention_mask=mask, **GREEDY)
    assert padded[:, 4:].tolist() == alone.tolist()


@torch.no_grad()
def test_the_number_of_loops_may_change_after_loading(transformers, written):
    model, _, folder = written
    if folder.name not in OWN_CODE:
        return  # its layers are unrolled, or its code is not ours
    theirs = load_whole(transformers, folder)
    name = "num_loops" if hasattr(theirs.config, "num_loops") else "total_ut_steps"
    for loops in (1, 2, 4):
        setattr(theirs.config, name, loops)
        want = model.readout(model(IDS, recurrent_steps=loops).hidden_RBLD[-1])
        torch.testing.assert_close(theirs(IDS).logits, want, atol=CLOSE, rtol=0)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing.*is deprecated:FutureWarning")
def test_gradients_are_the_same_when_visits_are_computed_again(transformers, load):
    gradients = []
    for reentrant in (None, True, False):
        model = load().train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(IDS, labels=IDS, use_cache=reentrant is not None).loss.backward()
        found = {name: each.grad for name, each in model.named_parameters()}
        gradients.append({name: each for name, each in found.items() if each is not None})
    for found in gradients[1:]:
        assert found.keys() == gradients[0].keys()
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)
    model.train()
    cache = load().eval()(IDS, use_cache=True)[1]
    with pytest.raises(ValueError, match="gradient checkpointing cannot go on from a cache"):
        model(IDS, past_key_values=cache)


@torch.no_grad()
def test_the_number_of_visits_takes_what_it_gives(transformers, load):
    model = load().eval()
    visits, layers = model.config.num_hidden_layers, len(model.model.layers)
    want = model(IDS).logits
    plain = model.generate(IDS[:, 1:9], **GREEDY)
    if not model._is_stateful:
        drafted = model.generate(IDS[:, 1:9], assistant_early_exit=1, **GREEDY)
        assert drafted.tolist() == plain.tolist()
    model.config.num_hidden_layers = 1
    model.config.num_hidden_layers = visits
    assert model.config.num_hidden_layers == visits
    assert model.config.to_dict()["num_hidden_layers"] == layers
    assert "visit_limit" not in model.config.to_dict()
    assert torch.equal(model(IDS).logits, want)


@torch.no_grad()
def test_generate_takes_what_transformers_offers(transformers, load):
    model = load().eval()
    prompt, mask = IDS[:, 1:17], torch.ones(1, 16, dtype=torch.long)
    want = model.generate(prompt, attention_mask=mask, **GREEDY)[:, -8:].tolist()
    embedded = model.get_input_embeddings()(prompt)
    for options in (
        {"inputs_embeds": embedded},
        {"input_ids": prompt, "inputs_embeds": embedded},
        {"input_ids": prompt, "prefill_chunk_size": 5},
        {"input_ids": prompt, "cache_implementation": "static"},
        {"input_ids": prompt, "cache_implementation": "dynamic"},
    ):
        found = model.generate(**options, attention_mask=mask, **GREEDY)
        assert found[:, -8:].tolist() == want, options.keys()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@torch.no_grad()
def test_forward_takes_masks_and_indices_and_is_one_graph(transformers, load):
    model = load().eval()
    want = model(IDS).logits
    causal = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    assert torch.equal(model(IDS, attention_mask=causal).logits, want)
    kept = torch.tensor([3, 7])
    torch.testing.assert_close(
        model(IDS, logits_to_keep=kept).logits, want[:, kept], atol=1e-5, rtol=0
    )
    padded = (torch.arange(40) > 2).long()[None]
    want = model(IDS, attention_mask=padded).logits
    inputs = {"attention_mask": padded, "use_cache": False}
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(IDS, **inputs).logits, want)
    exported = torch.export.export(model, (IDS,), inputs).module()
    torch.testing.assert_close(exported(IDS, **inputs).logits, want)


@pytest.mark.hf5
@torch.no_grad()
def test_requests_are_batched_continuously(load):
    transformers = pytest.importorskip("transformers", reason="see tools/test_hf.sh")
    model = load().eval()
    prompts = [IDS[:, 1:17], IDS[:, 4:9]]
    settings = transformers.GenerationConfig(
        max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    size = transformers.ContinuousBatchingConfig(max_batch_tokens=64, num_blocks=8)
    found = model.generate_batch(
        [prompt[0].tolist() for prompt in prompts],
        generation_config=settings,
        continuous_batching_config=size,
        warmup=False,
    )
    for prompt, answer in zip(prompts, found.values(), strict=True):
        want = model.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)
        assert answer.error is None
        assert answer.generated_tokens == want[0, prompt.shape[1] :].tolist()


@pytest.mark.hf5
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing.*is deprecated:FutureWarning")
@pytest.mark.parametrize("trainer", ["transformers", "trl"])
def test_it_trains_with_the_defaults_of(folder, tmp_path, trainer):
    transformers = pytest.importorskip("transformers", reason="see tools/test_hf.sh")
    import datasets
    import trl  # pyright: ignore[reportMissingImports]

    name, path = folder
    model = transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    before = {key: each.clone() for key, each in model.named_parameters()}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    where = {"output_dir": tmp_path, "use_cpu": True, "max_steps": 1, "report_to": "none"}
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, you."}]
    marked = tokenizer.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True
    )
    assert 0 < sum(marked["assistant_masks"]) < len(marked["input_ids"])
    tokenizer.save_pretrained(tmp_path / "again")
    assert same_ids(path / "tokenizer.json", tmp_path / "again" / "tokenizer.json")
    if trainer == "trl":
        data = datasets.Dataset.from_list([{"messages": chat}] * 8)
        arguments = trl.SFTConfig(**where)
        assert arguments.bf16
        assert arguments.gradient_checkpointing
        taught = trl.SFTTrainer(
            model=model, args=arguments, train_dataset=data, processing_class=tokenizer
        )
    else:
        rows = [{"input_ids": list(range(3, 40)), "labels": list(range(3, 40))}] * 8
        taught = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(**where),
            train_dataset=datasets.Dataset.from_list(rows),
        )
    assert taught.train().training_loss > 0
    assert any(not torch.equal(each, before[key]) for key, each in model.named_parameters()), name


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention", "mine"])
@torch.no_grad()
def test_every_attention_function_is_called_once_a_visit(transformers, load, attention):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # pyright: ignore

    calls: Counter[int] = Counter()

    def mine(module, *arguments, **settings):
        calls[module.layer_idx] += 1
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *arguments, **settings)

    ALL_ATTENTION_FUNCTIONS.register("mine", mine)
    # 48, as torch 2.13's FlexAttention on a CPU without AVX-512 is wrong at lengths of 8 modulo 32.
    ids = torch.arange(48)[None] * 7 % 300
    usual = load().eval()(ids, use_cache=False).logits
    theirs = load(attn_implementation=attention).eval()
    logits = theirs(ids, use_cache=False).logits
    torch.testing.assert_close(logits, usual, atol=5 * CLOSE, rtol=CLOSE)
    if attention == "mine":
        assert calls == dict.fromkeys(range(theirs.config.num_hidden_layers), 1)


@torch.no_grad()
def test_generate_sees_padding_and_what_a_cache_holds(transformers, load):
    """It finds out which arguments a model takes by their names."""
    theirs = load().eval()
    theirs.generation_config.pad_token_id = pad = 299
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    prompt = IDS[:, 1:11]
    alone = theirs.generate(prompt, **settings)
    padded = torch.cat([torch.full((1, 4), pad), prompt], dim=1)
    assert theirs.generate(padded, **settings)[:, 4:].tolist() == alone.tolist()
    first = theirs.generate(prompt, return_dict_in_generate=True, **settings)
    name = "cache" if "cache" in first.keys() else "past_key_values"  # noqa: SIM118
    turn = torch.cat([first.sequences, IDS[:, 20:24]], dim=1)
    seen: list[int] = []
    theirs.get_input_embeddings().register_forward_pre_hook(
        lambda _, given: seen.append(given[0].shape[1])
    )
    again = theirs.generate(turn, **{name: first[name]}, **settings)
    assert seen[0] == 5  # the last answered token, which the cache lacks, and the four new ones
    assert again.tolist() == theirs.generate(turn, **settings).tolist()
