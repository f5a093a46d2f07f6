"""Import of a model folder as a run with one checkpoint.

config.json ─► LlamaShape ─► exactly these names and shapes must be there
*.safetensors ─► one tensor at a time, file by file ─► write_checkpoint
"""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titan_loop.checkpoint.manifest import untrained
from titan_loop.checkpoint.safetensors_files import INDEX
from titan_loop.checkpoint.tensors import LazyTensor, write_checkpoint
from titan_loop.errors import UserError, listed, nearest
from titan_loop.formats.format import Format
from titan_loop.formats.llama_shape import EMBEDDING, HEAD, LlamaShape
from titan_loop.formats.model_types import MODEL_TYPES, NOT_DENSE
from titan_loop.formats.tokenizer_export import GENERATION_CONFIG
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder, decoder_config
from titan_loop.plugins import find, names
from titan_loop.runs.conversion import written_run
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.storage.json_files import read_json_object, read_small, write_json
from titan_loop.text.template_files import TEMPLATE, TOKENIZER_CONFIG, template_beside
from titan_loop.text.text_format import TextFormat
from titan_loop.text.tokenizer import (
    END_OF_TEXT,
    TOKENIZER_NAME,
    check_vocabulary,
    load_tokenizer,
    template_bos,
    vocab_size,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

CONFIG = "config.json"
_AGAIN = "download it again"
_COMPUTED = "rotary_emb.inv_freq"
"""A buffer that old versions of transformers saved; it follows from rope_theta."""
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "merges.txt", "tekken.json", "spiece.model")


def _shape_of(config: dict[str, Any]) -> LlamaShape:
    formats: list[Format] = [find("formats", name) for name in names("formats")]
    known = [each.folder for each in formats if each.folder is not None]
    for folder in known:
        if folder.describes(config):
            return folder.from_config(config)
    found = config.get("model_type")
    if (why := NOT_DENSE.get(str(found))) is None:
        close = nearest(str(found), [*MODEL_TYPES, *(folder.model_type for folder in known)])
    else:
        close = f": {why}; titan-loop retrofit --list names the models that can be"
    raise UserError(f"config.json: model_type={found!r:.40} cannot be imported{close}")


class ModelFolder:
    """A checked folder of a known format: config.json, safetensors, perhaps a tokenizer.json.

    `text` defines the end of a document and the rendering of chats; None without a tokenizer.
    `cut_tokenizer` takes the file's place where some of its added tokens have no row.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _refuse_links_outside(path)
        if not (path / CONFIG).exists():
            problem = "it is not a model, or its export or download never finished"
            raise UserError(f"{path} has no {CONFIG}: {problem}")
        config = read_json_object(path / CONFIG, fix=_AGAIN)
        self.shape = _shape_of(config)
        self._files = self.shape.opened(path)
        for name in [*self._files.shapes]:
            if name.endswith(_COMPUTED):
                del self._files.shapes[name]
        self._check_tensors()
        files = path / self.shape.tokenizer_folder
        tokenizer = files / TOKENIZER_NAME
        self.tokenizer = tokenizer if tokenizer.exists() else None
        if self.tokenizer is None:
            _refuse_other_tokenizers(files)
        self.cut_tokenizer: dict[str, Any] | None = None
        self.text: TextFormat | None = None
        if self.tokenizer is not None:
            loaded, rows = load_tokenizer(tokenizer), self.shape.vocab_size
            if vocab_size(loaded) > rows:
                self.cut_tokenizer = _with_rows(tokenizer, rows)
                loaded = type(loaded).from_str(json.dumps(self.cut_tokenizer))
            check_vocabulary(loaded, rows, str(tokenizer))  # any padding: Qwen 3's is 267 rows
            self.text = _text_format(files, path, config, loaded)

    @property
    def names(self) -> list[str]:
        """The format's tensors, in an order that is cheap to read."""
        of_file = {self.shape.file_name(name): name for name in self.shape.tensor_shapes()}
        return [of_file[name] for name in self._files.shapes]

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one tensor in the wanted type."""
        stored = self._files.read(self.shape.file_name(name))
        return self.shape.loaded(name, stored.to(dtype))

    def entries(self, dtype: torch.dtype) -> dict[str, LazyTensor]:
        """Return the model's parameters by name, in an order that is cheap to read."""
        shapes = self.shape.tensor_shapes()
        stored = {name: name for name in self.names}
        stored.setdefault(HEAD, EMBEDDING)
        entries = {
            self.shape.parameter_name(name): LazyTensor(
                shapes[name], dtype, partial(self.read, source, dtype)
            )
            for name, source in stored.items()
        }
        for name, shape in self.shape.zeros().items():
            entries[name] = LazyTensor(shape, dtype, partial(torch.zeros, shape, dtype=dtype))
        return entries

    def build(self, context_tokens: int | None = None) -> LoopDecoder:
        """Return the model, in fp32 on the CPU, without a run; None takes the folder's context."""
        options = replace(self.shape.options(), attention="sdpa")
        model = build_decoder(options, max_seq_len=context_tokens or self.shape.max_positions)
        state = model.state_dict()
        with torch.no_grad():
            for name, entry in self.entries(torch.float32).items():
                state.pop(name).copy_(entry.produce())
        assert not state, f"{self.path} has nothing for {[*state]}"
        return model.eval()

    def lineage(self) -> dict[str, Any]:
        """Return the record of the weights' origin for a manifest."""
        digest = hashlib.sha256((self.path / CONFIG).read_bytes()).hexdigest()
        return {"imported_from": str(self.path.resolve()), "config_sha256": digest}

    def _check_tensors(self) -> None:
        found, shapes = self._files.shapes, self.shape.tensor_shapes()
        expected = {
            self.shape.file_name(name): self.shape.file_shape(name, shape)
            for name, shape in shapes.items()
        }
        if self.shape.tie_weights and HEAD not in found:
            expected.pop(HEAD)  # transformers writes a tied matrix once
        missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
        if HEAD in missing:
            raise UserError(
                f"{self.path}: {HEAD} is missing, but config.json has tie_word_embeddings=false; "
                "the folder is incomplete, or that field is wrong"
            )
        if missing or extra:
            sets = {"missing": sorted(missing), "unknown": sorted(extra)}
            wrong = [
                f"{len(names)} {what} ({listed(names, 3)})" for what, names in sets.items() if names
            ]
            raise UserError(
                f"{self.path} does not have the {len(expected)} tensors of its config.json: "
                f"{'; '.join(wrong)}"
            )
        for name, shape in expected.items():
            if found[name] != shape:
                raise UserError(
                    f"{self.path}: {name} has shape {found[name]}, config.json says {shape}; one "
                    "of them is of another model"
                )
        if self.shape.tie_weights and HEAD in found:
            if not torch.equal(self._files.read(HEAD), self._files.read(EMBEDDING)):
                raise UserError(
                    f"{self.path}: config.json has tie_word_embeddings=true, but {HEAD} and "
                    f"{EMBEDDING} differ; set it to false, or repair the weights"
                )
            self._files.close()


def import_run(
    folder: ModelFolder, output: Path, command: Sequence[str], *, dtype: torch.dtype
) -> Path:
    """Write a folder's weights as a new run with one checkpoint, of step 0; return the checkpoint.

    Needs memory for one shard and one tensor. `dtype` is float32, which training needs and
    which holds every other type exactly, or bfloat16.
    """
    entries = folder.entries(dtype)
    content = untrained(
        folder.shape.recurrent_steps,
        decoder_config(folder.shape.options(), max_seq_len=1).architecture,
        data={},
        lineage={"parent": None, **folder.lineage()},
    )
    config = {
        "total_tokens": 0,  # none are trained on here
        "model": asdict(folder.shape.options()),
        "training": {"seq_len": folder.shape.max_positions},
        "dataloader": {"mixture": []},
        "text": None if folder.text is None else asdict(folder.text),
    }
    cut = folder.cut_tokenizer
    with written_run(output, config, command, tokenizer=None if cut else folder.tokenizer) as new:
        write_checkpoint(new.checkpoint(0), entries, content)
        if cut:
            write_json(new.path / TOKENIZER_NAME, cut)
    return RunDirectory(output).checkpoint(0)


def _refuse_links_outside(folder: Path) -> None:
    """Refuse links out of the folder: through one, an import could copy any file here."""
    inside = folder.resolve()
    # The cache of the Hugging Face Hub links to its own blobs.
    blobs = inside.parents[1] / "blobs" if inside.parent.name == "snapshots" else inside
    names = (CONFIG, GENERATION_CONFIG, TOKENIZER_NAME, TOKENIZER_CONFIG, TEMPLATE, INDEX)
    for file in (*(folder / name for name in names), *folder.glob("*.safetensors")):
        if file.is_symlink() and not {inside, blobs} & {*Path(os.path.realpath(file)).parents}:
            raise UserError(
                f"{file} is a link out of its folder, to {file.readlink()}; put the file itself "
                "there if you trust it"
            )


def _refuse_other_tokenizers(folder: Path) -> None:
    """Refuse a tokenizer in files that name no pre-tokenizer: only its class knows how to split."""
    for name in _OTHER_TOKENIZERS:
        if (folder / name).exists():
            raise UserError(
                f"{folder} has {name} but no {TOKENIZER_NAME}, which transformers makes: "
                f'AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}"); or remove '
                f"{name} to import the model without a tokenizer"
            )


def _with_rows(tokenizer: Path, rows: int) -> dict[str, Any]:
    """Return a tokenizer.json without added tokens that have no row, as Gemma 3's of images."""
    record = json.loads(read_small(tokenizer, fix=_AGAIN))
    added = record.get("added_tokens", [])
    if cut := [each["content"] for each in added if each["id"] >= rows]:
        logger.warning(f"{tokenizer}: without {listed(cut, 3)}, for which the model has no row")
    return {**record, "added_tokens": [each for each in added if each["id"] < rows]}


def _text_format(
    files: Path, folder: Path, config: dict[str, Any], tokenizer: "Tokenizer"
) -> TextFormat:
    # config.json names the end of a document, the tokenizer's config the end of a turn.
    template = template_beside(files, fix=_AGAIN)
    begins = _tokens(CONFIG, config, "bos_token_id", tokenizer)
    ends = _tokens(CONFIG, config, "eos_token_id", tokenizer)
    known = [END_OF_TEXT] if tokenizer.token_to_id(END_OF_TEXT) is not None else []
    # The template says whether texts begin with BOS. Without one, BOS separates documents.
    bos_id = template_bos(tokenizer, str(files / TOKENIZER_NAME), "correct its post_processor")
    separators = begins[:1] if bos_id is None else []
    end_of_text = [*separators, *known, *ends[:1], END_OF_TEXT][0]
    turn_end = ends[0] if ends else None
    if template is not None:
        token = template.variables.get("eos_token")
        if token is not None and tokenizer.token_to_id(token) is not None:
            turn_end = token
    text = TextFormat(
        end_of_text=end_of_text,
        turn_end=None if turn_end == end_of_text else turn_end,
        chat_template=None if template is None else template.text,
        template_variables={} if template is None else template.variables,
        begin_of_text=None if bos_id is None else tokenizer.id_to_token(bos_id),
    )
    try:
        generation = read_json_object(folder / GENERATION_CONFIG, fix=_AGAIN)
    except FileNotFoundError:
        generation = {}
    named = _tokens(GENERATION_CONFIG, generation, "eos_token_id", tokenizer) or ends
    usual = {text.turn_end, text.end_of_text}
    return replace(text, end_tokens=tuple(named)) if {*named} - usual else text


def _tokens(file: str, config: dict[str, Any], name: str, tokenizer: "Tokenizer") -> list[str]:
    value = config.get(name)
    indices = value if isinstance(value, list) else [] if value is None else [value]
    tokens: list[str] = []
    for index in indices:
        token = tokenizer.id_to_token(index) if type(index) is int and index >= 0 else None
        if token is None:
            raise UserError(
                f"{file}: {name}={value!r} is not a token of the folder's {TOKENIZER_NAME}; name "
                "one, or leave the field out"
            )
        tokens.append(token)
    return tokens
