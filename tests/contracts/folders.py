"""Exported folders of every format, each of a small model whose every weight matters."""

from pathlib import Path
from typing import Any, NamedTuple

from tests.contracts.families import Folder, contracts
from tests.families.ouro.hugging_face.conftest import convert, random_model, write_run
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder, get_family
from titan_loop.runs.saved_run import SavedRun

VOCABULARY = 300
WINDOW = 128

FOLDERS: dict[str, Folder] = {
    name: folder for each in contracts().values() for name, folder in each.folders.items()
}
"""Format → the models that it holds."""
OWN_CODE = [name for name, folder in FOLDERS.items() if folder.own_code]
"""Formats whose folders hold code for transformers."""
MODELS = [(name, n) for name, folder in FOLDERS.items() for n in range(len(folder.models))]
"""Format and number of a model that it holds."""
IN_TRANSFORMERS = [name for name, folder in FOLDERS.items() if folder.transformers]
"""Formats whose folders transformers runs."""


class Written(NamedTuple):
    """A model, its run and its exported folder."""

    model: LoopDecoder
    run: Path
    folder: Path


def write_model(run: Path, name: str, number: int = 0, **options: Any) -> LoopDecoder:
    """Write a run of one of the format's models, with options changed."""
    family, models = FOLDERS[name][:2]
    chosen = {"vocab_size": VOCABULARY, **models[number], **options}
    options_of = get_family(family).options(**chosen)
    model = random_model(options_of)  # type: ignore[arg-type]
    write_run(run, options_of, model)  # type: ignore[arg-type]
    return model


def write_folder(
    place: Path, name: str, tokenizer: Path | None, *flags: object, number: int = 0, **options: Any
) -> Written:
    """Write such a run, and export it."""
    model = write_model(place / "run", name, number, **options)
    with_tokenizer = ("--no-tokenizer",) if tokenizer is None else ("--tokenizer", tokenizer)
    convert(
        "export", place / "run", "--to", name, "--output", place / name, *with_tokenizer, *flags
    )
    return Written(model, place / "run", place / name)


def opened(run: Path) -> LoopDecoder:
    """Return the model of a run's newest checkpoint."""
    saved = SavedRun.open(run)
    model = build_decoder(saved.model_options, max_seq_len=WINDOW).eval()
    reader = CheckpointReader(saved.checkpoint().path)
    model.load_state_dict({name: reader.read(name) for name in model.state_dict()})
    return model
