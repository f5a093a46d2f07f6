"""A saved run is opened by its folder or a checkpoint's."""

import json
import shutil
import tarfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from tests.checkpoint.test_stored import STORED
from titan_loop.errors import UserError
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.text.text_format import TextFormat


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """A run on the source beside it, with one checkpoint."""
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run"


def edit_config(run: Path, **changes: object) -> None:
    path = run / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


MODEL = {"family": "ouro", "size": "debugmodel"}


@pytest.mark.parametrize(
    ("changes", "read", "message"),
    [
        ({"model": {**MODEL, "other": 3}}, "model_options", "model.other=3: family ouro has"),
        ({"model": {**MODEL, "family": "oro"}}, "model_options", "is unknown; nearest: ouro"),
        ({"training": 5}, "seq_len", "; repair it"),
    ],
)
def test_a_config_that_cannot_be_read_is_one_line(old_run: Path, changes, read, message):
    edit_config(old_run, **changes)
    with pytest.raises(UserError) as caught:
        getattr(SavedRun(old_run), read)
    assert "config.json" in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_neither_run_nor_checkpoint_is_refused(old_run: Path, tmp_path: Path):
    alone = shutil.copytree(old_run / "checkpoints" / "step-2", tmp_path / "alone")
    shutil.rmtree(old_run / "checkpoints")
    (tmp_path / "empty").mkdir()
    for path, complaint in (
        (tmp_path / "nowhere", "is not a folder"),
        (tmp_path, r"has no manifest\.json.*; give one of run in it"),
        (tmp_path / "empty", r"has no manifest\.json.*; choose another"),
        (alone, "give a checkpoint inside its run"),
    ):
        with pytest.raises(UserError, match=complaint):
            SavedRun.open(path)
    with pytest.raises(UserError, match="has no committed checkpoint; train first"):
        SavedRun.open(old_run).checkpoint()
    assert SavedRun(old_run).lineage() == []


def test_a_run_with_a_pipeline_has_the_pipelines_tokenizer(old_run: Path, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="a")).save(str(path))
    options = {"pipeline": "my:documents", "tokenizer_path": str(path), "eos_token": "</s>"}
    edit_config(old_run, dataloader={"mixture": ["unread=1"], **options})
    run = SavedRun(old_run)
    assert run.sources == []
    assert run.tokenizer() == (path, True)
    assert run.text_format(Tokenizer.from_file(str(path))) == TextFormat(end_of_text="</s>")
    path.unlink()
    with pytest.raises(UserError, match=r"tokenizer .*tokenizer.json is not a file"):
        run.tokenizer()


def test_plain_text_leaves_a_chat_model_its_template(old_run: Path, tmp_path: Path):
    parent = shutil.copytree(old_run, tmp_path / "parent")
    chats = {"end_of_text": "</s>", "chat_template": "{{ messages }}", "end_tokens": ["</s>"]}
    edit_config(parent, text=chats)
    edit_config(old_run, checkpoint={"carry": {"parent": str(parent)}})
    run = SavedRun(old_run)
    text = run.text_format(Tokenizer.from_file(str(run.tokenizer().path)))
    assert (text.chat_template, text.end_of_text) == ("{{ messages }}", "<|endoftext|>")
    assert text.end_tokens == ("</s>", "<|endoftext|>")  # a turn, and a document, end with
    edit_config(parent, text={"turn_end": "<|im_end|>", "chat_template": None})  # an older run
    assert run.text_format(Tokenizer.from_file(str(run.tokenizer().path))).knows_chats


def test_run_and_checkpoint_open_the_same_run(old_run: Path, tmp_path: Path):
    by_checkpoint = SavedRun.open(old_run / "checkpoints" / "step-2")
    assert by_checkpoint.path == SavedRun.open(old_run).path == old_run
    # A checkpoint that was named is taken as it is; one that is chosen has to be whole.
    assert by_checkpoint.checkpoint().step == 2
    (old_run / "checkpoints" / "step-2" / ".metadata").unlink()
    with pytest.raises(UserError, match=r"step-2: \.metadata is missing"):
        SavedRun.open(old_run).checkpoint()
    link = old_run / "checkpoints" / "step-2"
    link.symlink_to(link.rename(tmp_path / "archived"))
    assert SavedRun.open(link).path == old_run


def test_without_its_sources_a_run_has_no_known_tokenizer(old_run: Path):
    edit_config(old_run, dataloader={"mixture": ["gone/source=1"]})
    run = SavedRun(old_run)
    assert run.text_format(Tokenizer(models.BPE())) == TextFormat()
    with pytest.raises(UserError, match="put it back, or give its tokenizer with --tokenizer"):
        run.tokenizer()
    assert run.tokenizer("other.json") == (Path("other.json"), False)


def test_relative_paths_are_found_from_any_folder(
    old_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Those of the last start; a project that was moved is looked through from the run upwards."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "runs" / "mine").mkdir(parents=True)
    for folder in (project, elsewhere):
        for name in ("sources/my", "runs/parent"):
            (folder / name).mkdir(parents=True)
    config = json.loads((old_run / "config.json").read_text())
    config["dataloader"]["mixture"] = ["sources/my=0.5:packed", "sources/gone=0.5"]
    config["checkpoint"]["carry"]["parent"] = "runs/parent"
    mine = RunDirectory(project / "runs" / "mine")
    monkeypatch.chdir(project)
    mine.create_or_open([], config)
    assert SavedRun(mine.path).sources == [Path("sources/my"), Path("sources/gone")]
    monkeypatch.chdir(elsewhere)
    run = SavedRun(mine.path)
    assert run.mixture == [f"{project}/sources/my=0.5:packed", f"{project}/sources/gone=0.5"]
    assert run.dataloader["mixture"] == run.mixture
    assert run.parent == project / "runs" / "parent"
    moved = project.rename(tmp_path / "moved")
    assert SavedRun(moved / "runs" / "mine").sources[0] == moved / "sources" / "my"
    with pytest.raises(UserError, match=rf"runs/none is not a folder \(in {elsewhere}\)"):
        SavedRun.open("runs/none")
