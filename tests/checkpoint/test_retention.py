"""The keep policy, tags, and deletions that may be killed half-way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_loop.checkpoint import retention
from titan_loop.checkpoint.manifest import MANIFEST
from titan_loop.checkpoint.retention import (
    add_tag,
    committed_steps,
    discard,
    read_tags,
    remove_tag,
    stale_steps,
    unfinished_steps,
)
from titan_loop.errors import UserError


def test_the_newest_the_multiples_and_the_kept_stay():
    steps = [10, 20, 30, 40, 50, 60]
    assert stale_steps(steps, kept=[20], latest=2, every=30) == [10, 40]
    assert stale_steps(steps, kept=[], latest=3, every=0) == [10, 20, 30]
    assert stale_steps(steps, kept=[], latest=0, every=0) == []


@given(
    steps=st.sets(st.integers(1, 500)),
    latest=st.integers(0, 10),
    every=st.integers(0, 50),
    data=st.data(),
)
def test_what_must_stay_stays(steps, latest, every, data):
    kept = data.draw(st.sets(st.sampled_from(sorted(steps)))) if steps else set()
    left = steps - set(stale_steps(steps, kept=kept, latest=latest, every=every))
    assert set(sorted(steps)[-latest:] if latest else steps) <= left
    assert kept <= left
    assert not every or {step for step in steps if step % every == 0} <= left
    if latest:
        for step in left - kept - set(sorted(steps)[-latest:]):
            assert every
            assert step % every == 0


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
    (tmp_path / "tags.json").write_text("[")
    with pytest.raises(UserError, match="is damaged"):
        read_tags(tmp_path)


def test_the_commit_record_goes_first(tmp_path, monkeypatch):
    checkpoint = tmp_path / "step-7"
    checkpoint.mkdir()
    (checkpoint / MANIFEST).write_text("{}")
    assert committed_steps(tmp_path) == [7]

    def fail(path):
        raise OSError("the disk is gone")

    monkeypatch.setattr(retention.shutil, "rmtree", fail)
    with pytest.raises(OSError, match="gone"):
        discard(checkpoint)
    assert committed_steps(tmp_path) == []
    assert unfinished_steps(tmp_path) == [7]
    monkeypatch.undo()
    discard(checkpoint)
    discard(checkpoint)
    assert list(tmp_path.iterdir()) == []


def test_of_a_link_only_the_link_is_deleted(tmp_path, caplog):
    archived = tmp_path / "archive" / "step-7"
    archived.mkdir(parents=True)
    (archived / MANIFEST).write_text("{}")
    for target in (archived, tmp_path / "gone"):
        link = tmp_path / "step-7"
        link.symlink_to(target)
        discard(link)
        assert not link.is_symlink()
        assert f"only the link was deleted, not {target}" in caplog.text
        assert (archived / MANIFEST).read_text() == "{}"


def test_only_folders_named_after_a_step_count(tmp_path):
    names = ("step-3", "damaged-step-4", "step-5-copy", "step-x", "step-006", "step-٩", "step-00")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    (tmp_path / "step-9").write_text("a file")
    assert committed_steps(tmp_path) == [3]
    assert unfinished_steps(tmp_path) == []
