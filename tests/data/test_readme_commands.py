"""The commands and the configuration file of the data package's READMEs work as they stand."""

import glob
import json
import shlex
from pathlib import Path

import pytest

import titan_loop.data
from titan_loop.cli.main import main
from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.prepare.config import Minhash, read_prepare_config
from titan_loop.errors import EXIT_OK

PACKAGE = Path(titan_loop.data.__path__[0])
README = (PACKAGE / "README.md").read_text()
PREPARING = (PACKAGE / "prepare" / "README.md").read_text()


def block(text: str, language: str) -> str:
    (found,) = text.split(f"```{language}\n")[1:]
    return found.split("```")[0]


def test_the_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    package = Path(titan_loop.__path__[0])
    for name in ("data", "cli"):
        texts = [path.read_text() for path in sorted((package / name).glob("*.py"))]
        lines = [json.dumps({"text": text}) + "\n" for text in texts if text]
        (tmp_path / "my" / f"{name}.jsonl").write_text("".join(lines))
    chats = [{"question": f"{n} + {n}?", "answer": f"{2 * n}."} for n in range(40)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    commands = block(README, "bash").replace("\\\n", " ").splitlines()
    assert len(commands) == 6
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "titan-loop"
        expanded = [name for word in words for name in (sorted(glob.glob(word)) or [word])]
        assert main(expanded) == EXIT_OK, command
    out = capsys.readouterr().out
    assert "<|im_start|>assistant\n⟦" in out
    assert out.endswith("sources/my: sound\n")
    mixture = README.split("--dataloader.mixture ")[1].split("`")[0].split(",")
    config = WindowLoader.Config(mixture=mixture)
    assert config.build(dp_world_size=1, dp_rank=0, seq_len=64, local_batch_size=2)


def test_the_configuration_file_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "prepare.toml"
    path.write_text(block(PREPARING, "toml"))
    config = read_prepare_config(path)
    assert list(config.quality) == ["gopher_quality", "gopher_repetition"]
    assert config.minhash == Minhash()
    assert config.decontaminate is not None
    assert config.slurm["partition"] == "cpu"
