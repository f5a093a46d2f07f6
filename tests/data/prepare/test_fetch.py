"""Public sets by name, with the Hub replaced by a folder."""

import shutil
from pathlib import Path

import pytest

from titan_loop.cli.main import main
from titan_loop.data.prepare.fetch import PUBLIC_SETS


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A folder that has what the Hub would: OWNER/NAME/FILES."""
    root = tmp_path / "hub"
    stories = root / PUBLIC_SETS["tinystories"].repo / "data"
    stories.mkdir(parents=True)
    for name in ("train-0.parquet", "train-1.parquet", "validation-0.parquet"):
        (stories / name).write_text(name)

    class Api:
        def list_repo_files(self, repo: str, *, repo_type: str) -> list[str]:
            if not (root / repo).is_dir():
                raise ConnectionError("no route to host\nand more")
            assert repo_type == PUBLIC_SETS["tinystories"].kind
            files = [path for path in (root / repo).rglob("*") if path.is_file()]
            return [str(path.relative_to(root / repo)) for path in files]

    def download(repo: str, file: str, *, repo_type: str, local_dir: Path) -> str:
        (local_dir / file).parent.mkdir(parents=True, exist_ok=True)
        return str(shutil.copyfile(root / repo / file, local_dir / file))

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    return root


def test_the_training_files_come_with_their_licence(hub, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["data", "fetch", "tinystories", "--output", str(out)]) == 0
    files = [out / "data" / f"train-{number}.parquet" for number in range(2)]
    *paths, licence = capsys.readouterr().out.splitlines()
    assert [Path(path) for path in paths] == files
    assert "Licence: CDLA-Sharing 1.0; give it to data tokenize with --licence" in licence
    first = ["data", "fetch", "tinystories", "--output", str(tmp_path / "one"), "--files", "1"]
    assert main(first) == 0
    assert [path.name for path in (tmp_path / "one").rglob("*.parquet")] == ["train-0.parquet"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["wikitext"], "wikitext cannot be downloaded (no route to host); check the network"),
        (["tinystory"], "unknown set; nearest: tinystories"),
        (["tinystories", "--files", "0"], "--files=0 must be at least 1"),
    ],
)
def test_what_cannot_be_had_is_one_line(hub, tmp_path, capsys, words, message):
    assert main(["data", "fetch", *words, "--output", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
