"""Download of public text and tokenizers from the Hugging Face Hub, by name."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from titan_loop.errors import UserError, first_line, nearest, require_at_least

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublicSet:
    """A repository of the Hub, OWNER/NAME, with the licence that its publisher states."""

    repo: str
    pattern: str
    licence: str
    kind: Literal["dataset", "model"] = "dataset"


PUBLIC_SETS = {
    "fineweb-edu": PublicSet("HuggingFaceFW/fineweb-edu", "sample/10BT/*.parquet", "ODC-By 1.0"),
    "openwebmath": PublicSet("open-web-math/open-web-math", "data/*.parquet", "ODC-By 1.0"),
    "tinystories": PublicSet("roneneldan/TinyStories", "data/train-*.parquet", "CDLA-Sharing 1.0"),
    "wikitext": PublicSet(
        "Salesforce/wikitext", "wikitext-103-raw-v1/train-*.parquet", "CC BY-SA 3.0 and GFDL"
    ),
    "ouro-tokenizer": PublicSet("ByteDance/Ouro-1.4B", "tokenizer.json", "Apache 2.0", "model"),
    "smollm2-tokenizer": PublicSet(
        "HuggingFaceTB/SmolLM2-135M", "tokenizer.json", "Apache 2.0", "model"
    ),
    "gpt2-tokenizer": PublicSet("openai-community/gpt2", "tokenizer.json", "MIT", "model"),
}


def fetch(name: str, *, output: Path, files: int | None = None) -> Iterator[str]:
    """Download a public data set or tokenizer from the Hugging Face Hub.

    Names: fineweb-edu, openwebmath, tinystories, wikitext; ouro-tokenizer, smollm2-tokenizer,
    gpt2-tokenizer. Give the same command again to continue after an interruption.

    Args:
        name: Name of the set.
        output: Folder for its files, which keep their paths in the repository.
        files: Number of files to download, in the order of their names; by default all.

    Returns:
        Paths of the files, then a line about their licence.
    """
    if name not in PUBLIC_SETS:
        raise UserError(f"data fetch {name}: unknown set{nearest(name, PUBLIC_SETS)}")
    require_at_least(1, **{"--files": files})
    chosen = PUBLIC_SETS[name]
    try:
        from huggingface_hub import HfApi, hf_hub_download

        listed = HfApi().list_repo_files(chosen.repo, repo_type=chosen.kind)
        wanted = sorted(file for file in listed if fnmatch(file, chosen.pattern))[:files]
        for number, file in enumerate(wanted, start=1):
            logger.info("%s: %d of %d, %s", chosen.repo, number, len(wanted), file)
            yield hf_hub_download(chosen.repo, file, repo_type=chosen.kind, local_dir=output)
    except Exception as error:  # the client raises many kinds
        raise UserError(
            f"data fetch {name}: {chosen.repo} cannot be downloaded ({first_line(error)}); check "
            "the network and repeat the command, or download it elsewhere and copy its files"
        ) from error
    if not wanted:
        raise UserError(
            f"data fetch {name}: {chosen.repo} has no {chosen.pattern} any more; give its files to "
            "data tokenize by hand"
        )
    yield (f"Licence: {chosen.licence}; give it to data tokenize with --licence '{chosen.licence}'")
