"""Chat templates in files: a Jinja text, or what lies beside a `tokenizer.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_loop.errors import UserError
from titan_loop.storage.file_names import require_local
from titan_loop.storage.json_files import DamagedFileError, read_json_object, read_small
from titan_loop.text.chat_template import ChatTemplate

TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
OWN = "tokenizer"
"""In place of a path: the template beside the tokenizer."""


def tokenizer_settings(folder: Path, *, fix: str) -> Mapping[str, Any]:
    """Return the contents of a folder's `tokenizer_config.json`; empty without one."""
    try:
        return read_json_object(folder / TOKENIZER_CONFIG, fix=fix)
    except FileNotFoundError:
        return {}


def template_beside(folder: Path, *, fix: str) -> ChatTemplate | None:
    """Return the template in a tokenizer's folder, as transformers finds it; None without one."""
    settings = tokenizer_settings(folder, fix=fix)
    text = settings.get("chat_template")
    if isinstance(text, list):  # of named ones, of which chats take the default
        named = [each for each in text if isinstance(each, dict)]
        text = next((t.get("template") for t in named if t.get("name") == "default"), None)
    if (folder / TEMPLATE).exists():
        text = _text(folder / TEMPLATE, fix)
    if not isinstance(text, str):
        return None
    return ChatTemplate(text=text, variables=special_tokens(settings))


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that `tokenizer_config.json` names, such as `bos_token`."""
    tokens: dict[str, str] = {}
    for name, value in settings.items():
        value = value.get("content") if isinstance(value, dict) else value  # with its options
        if name.endswith("_token") and isinstance(value, str):
            tokens[name] = value
    return tokens


def chosen_template(chosen: str | Path, tokenizer: Path) -> ChatTemplate:
    """Return the template of a path, or with "tokenizer" the one beside the tokenizer."""
    folder = tokenizer.absolute().parent
    if str(chosen) == OWN:
        found = template_beside(folder, fix="download it again")
        if found is None:
            raise UserError(
                f"chat_template=tokenizer: {folder} has neither {TEMPLATE} nor a template in "
                f"{TOKENIZER_CONFIG}: give the path of one, or leave the flag out for ChatML"
            )
        return found
    require_local(chosen, "chat_template")
    path = Path(chosen)
    if not path.is_file():
        raise UserError(f"chat_template {path} is not a file: give a .jinja file, or tokenizer")
    variables = special_tokens(tokenizer_settings(folder, fix="download it again"))
    return ChatTemplate(text=_text(path, "give a .jinja file"), variables=variables)


def _text(path: Path, fix: str) -> str:
    try:
        return read_small(path, fix=fix).decode()
    except UnicodeDecodeError as error:
        raise DamagedFileError(path, "not UTF-8", fix) from error
