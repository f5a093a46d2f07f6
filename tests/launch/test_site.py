"""The settings of a cluster, from its site file."""

from pathlib import Path

import pytest

from titan_loop.errors import UserError
from titan_loop.launch.site import Site, find_site, source_site

OUTSIDE = {"PATH": "/usr/bin:/bin"}


@pytest.fixture(autouse=True)
def a_users_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_default_site_file_is_optional(tmp_path):
    assert find_site(None) is None
    assert source_site(None, {"A": "b"}) == {"A": "b"}
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "site.sh").touch()
    assert find_site(None) == tmp_path / "slurm" / "site.sh"
    (tmp_path / "other.sh").touch()
    assert find_site("other.sh") == tmp_path / "other.sh"
    with pytest.raises(UserError, match=r"--site=nowhere\.sh is not a file; copy slurm/site"):
        find_site("nowhere.sh")


def test_settings_come_from_their_variables():
    assert Site.of({}) == Site()
    variables = {"TITAN_LOOP_CONTAINER": "apptainer exec 'my image.sif'", "SBATCH_PARTITION": "gpu"}
    assert Site.of(variables) == Site(
        container=("apptainer", "exec", "my image.sif"), partition="gpu"
    )


def write(folder: Path, text: str) -> Path:
    (folder / "site.sh").write_text(text)
    return folder / "site.sh"


def test_a_site_file_may_print_and_export_several_lines(tmp_path):
    site = write(tmp_path, "echo loading; export A='x=y\nz' TITAN_LOOP_CONTAINER=run\n")
    found = source_site(site, {**OUTSIDE, "TITAN_LOOP_OWN": "before"})
    assert found["A"] == "x=y\nz"
    assert (found["TITAN_LOOP_CONTAINER"], found["TITAN_LOOP_OWN"]) == ("run", "before")
    assert source_site(write(tmp_path, ""), OUTSIDE)["PATH"] == OUTSIDE["PATH"]
    site = write(tmp_path, "export TITAN_LOOP_PLUGINS=my_package.mine")
    assert source_site(site, OUTSIDE)["TITAN_LOOP_PLUGINS"] == "my_package.mine"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("echo first >&2; echo no such module >&2; false", r"fails \(no such module\); fix it"),
        ("exit 3", r"fails \(code 3\); fix it"),
        ("false; export A=b", r"fails \(code 1\); fix it"),
        (
            "export TITAN_LOOP_CONTAINR=x",
            "sets TITAN_LOOP_CONTAINR, which is not a setting; nearest: TITAN_LOOP_CONTAINER",
        ),
    ],
)
def test_a_site_file_that_does_not_work(tmp_path, text, complaint):
    with pytest.raises(UserError, match=complaint):
        source_site(write(tmp_path, text), OUTSIDE)
