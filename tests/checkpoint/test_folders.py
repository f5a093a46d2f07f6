"""The keep policy, tags, and deletions that may be killed half-way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.test_choosing import committed
from titan_loop.checkpoint import folders
from titan_loop.checkpoint.folders import (
    add_tag,
    committed_steps,
    discard,
    read_tags,
    remove_tag,
    unfinished_steps,
)
from titan_loop.checkpoint.keep_policy import KeepPolicy, delete_stale
from titan_loop.checkpoint.manifest import MANIFEST
from titan_loop.errors import UserError


def test_only_what_the_newest_commit_is_older_than_is_deleted(tmp_path, caplog):
    """Later checkpoints are of another attempt, and a damaged one is for the user to look at."""
    for step in (1, 2, 3, 4, 5, 6, 8):
        committed(tmp_path, step)
    (tmp_path / "step-3" / MANIFEST).write_text("{}")
    for step in (0, 7, 9):
        (tmp_path / f"step-{step}").mkdir()
    add_tag(tmp_path / "step-1", "paper")
    delete_stale(
        tmp_path, KeepPolicy(keep_latest_k=2), newest=6, in_use=lambda path: path.name == "step-2"
    )
    assert committed_steps(tmp_path) == [1, 2, 3, 5, 6, 8]
    assert unfinished_steps(tmp_path) == [7, 9]
    assert "step-3 is neither counted nor deleted" in caplog.text
    (tmp_path / "step-5" / MANIFEST).unlink()
    delete_stale(tmp_path, KeepPolicy(keep_latest_k=2), newest=5, in_use=lambda path: False)
    assert unfinished_steps(tmp_path) == [5, 7, 9]
    assert committed_steps(tmp_path) == [1, 2, 3, 6, 8]


@given(
    steps=st.sets(st.integers(1, 500)),
    latest=st.integers(0, 10),
    every=st.integers(0, 50),
    data=st.data(),
)
def test_what_must_stay_stays(steps, latest, every, data):
    tagged = data.draw(st.sets(st.sampled_from(sorted(steps)))) if steps else set()
    policy = KeepPolicy(latest, every)
    stale = policy.stale({step: {} for step in steps}, {step: ["a"] for step in tagged})
    left = steps - set(stale)
    newest = set(sorted(steps)[-latest:] if latest else steps)
    multiples = {step for step in steps if every and step % every == 0}
    assert left == newest | tagged | multiples


def test_tags_are_names_that_come_and_go(tmp_path):
    assert read_tags(tmp_path) == []
    add_tag(tmp_path, "paper")
    add_tag(tmp_path, "best")
    add_tag(tmp_path, "paper")
    assert read_tags(tmp_path) == ["best", "paper"]
    remove_tag(tmp_path, "best")
    assert read_tags(tmp_path) == ["paper"]
    with pytest.raises(UserError, match="no tag 'best'; it has paper"):
        remove_tag(tmp_path, "best")


def test_the_commit_record_goes_first(tmp_path, monkeypatch):
    checkpoint = tmp_path / "step-7"
    checkpoint.mkdir()
    (checkpoint / MANIFEST).write_text("{}")
    assert committed_steps(tmp_path) == [7]

    def fail(path):
        raise OSError("the disk is gone")

    monkeypatch.setattr(folders.shutil, "rmtree", fail)
    with pytest.raises(OSError, match="gone"):
        discard(checkpoint)
    assert committed_steps(tmp_path) == []
    assert unfinished_steps(tmp_path) == [7]
    monkeypatch.undo()
    discard(checkpoint)
    discard(checkpoint)
    assert list(tmp_path.iterdir()) == []


def test_of_a_link_only_the_link_is_deleted(tmp_path):
    archived = committed(tmp_path / "archive", 2)
    (tmp_path / "step-2").symlink_to(archived)
    discard(tmp_path / "step-2")
    assert not (tmp_path / "step-2").is_symlink()
    assert committed_steps(archived.parent) == [2]


def test_only_folders_named_after_a_step_count(tmp_path):
    names = ("step-3", "damaged-step-4", "step-5-copy", "step-x", "step-006", "step-٩", "step-00")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    (tmp_path / "step-9").write_text("a file")
    assert committed_steps(tmp_path) == [3]
    assert unfinished_steps(tmp_path) == []
