"""The report: one page with everything inside, also of awkward runs, looked at in a browser."""

import html.parser
import re
import shutil
from pathlib import Path

import pytest

from tests.analysis.test_plots import scored, write_held_out, write_metrics
from tests.evaluation.runs import write_checkpoint_of, write_run_of
from titan_loop.analysis import report
from titan_loop.analysis.recipe_plot import StageCurve
from titan_loop.analysis.report import REPORT_NAME, write_report
from titan_loop.checkpoint.manifest import read_manifest, reference, write_manifest
from titan_loop.cli.main import main
from titan_loop.evaluation.task_report import ReadingResult, TaskReport
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.saved_run import SavedRun
from titan_loop.storage.json_files import write_json

SECTIONS = [
    "Summary",
    "Loss per recurrent step",
    "Where tokens exit",
    "Held-out text while training",
    "Depth sweep",
    "Quality against compute",
    "Tasks",
    "Lineage",
    "Stage boundaries",
]


class Page(html.parser.HTMLParser):
    """What a page shows, and everything it would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs) -> None:
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "data")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def adopt(child: Path, parent: Path) -> None:
    """Let a run's checkpoints name a parent, as its trainer would have."""
    (checkpoint,) = RunDirectory(child).checkpoints.iterdir()
    content = read_manifest(checkpoint)
    (origin,) = RunDirectory(parent).checkpoints.iterdir()
    content["lineage"] = {"origin": reference(origin), "stage": child.name, "recipe_sha256": "ab"}
    write_manifest(checkpoint, content)


@pytest.fixture(scope="module")
def family(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A parent and its child, with everything a report can show of the child, and the report."""
    folder = tmp_path_factory.mktemp("family")
    parent, child = (write_run_of(source, folder / name) for name in ("first", "a<b> & c"))
    for run in (parent, child):
        write_checkpoint_of(run, 3)
        write_metrics(RunDirectory(run), 12)
    adopt(child, parent)
    write_held_out(RunDirectory(child))
    record = RunDirectory(child).read_run()
    record["versions"] = {"torch": "2.1", "numpy": "2.0"}
    record["restarts"] = [{"versions": {**record["versions"], "torch": "2.2"}}]
    write_json(RunDirectory(child).run_json, record)
    bits = {"static:1": 2.5, "static:2": 2.25, "q:0.5": 2.3, "hidden:0.1": 2.27, "kl:inf,inf": 2.25}
    TaskReport(
        step=3,
        tokens=300,
        trained_recurrent_steps=2,
        manifest_sha256="ab",
        tasks={
            "held_out/code": {
                name: ReadingResult(
                    metrics={
                        "bits_per_byte": value,
                        "bits_per_byte_low": value - 0.1,
                        "bits_per_byte_high": value + 0.1,
                    },
                    mean_steps=1.0 if name == "static:1" else 1.7,
                )
                for name, value in bits.items()
            },
            "mmlu": {"static:2": ReadingResult(metrics={"acc,none": 0.3}, mean_steps=2.0)},
        },
        failures={"gsm8k": "it <needs> the network"},
    ).save(RunDirectory(child))
    assert main(["report", str(child)]) == 0
    return parent, child


def test_everything_is_on_one_page_that_loads_nothing(family: tuple[Path, Path]):
    _, child = family
    path = child / REPORT_NAME
    page = Page(path)
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"<h2>(.*?)</h2>", text) == SECTIONS
    assert "script" not in page.tags
    assert page.tags.count("img") == 6
    assert all(source.startswith("data:image/png;base64,") for source in page.loads)
    assert not re.search(r"url\(|@import|https?://", text)
    shown = "".join(page.text)
    assert "a<b> & c" in shown
    assert "torch 2.1 then 2.2, numpy 2.0" in shown
    assert "it <needs> the network" in shown
    assert {image.name for image in (child / "plots").iterdir()} == {
        "loss_per_step.png", "exit_pmf.png", "depths.png", "frontier.png", "stages.png",
        "held_out.png",
    }  # fmt: skip


def test_a_parents_curve_ends_where_its_child_began(family: tuple[Path, Path], monkeypatch):
    drawn: list[StageCurve] = []
    monkeypatch.setattr(
        report, "plot_recipe", lambda branches, path: drawn.extend(branches[0]) or path
    )
    _, child = family
    report._lineage(RunDirectory(child))
    steps = [[record["step"] for record in curve.records] for curve in drawn]
    whole = [record["step"] for record in RunDirectory(child).read_metrics()]
    assert steps == [[step for step in whole if step <= 3], whole]


def test_the_chain_is_found_also_when_the_folder_has_moved(
    family: tuple[Path, Path], tmp_path: Path
):
    parent, child = family
    chain = SavedRun(child).lineage()
    assert [ancestor.run.name for ancestor in chain] == [parent.name, child.name]
    assert chain[1].stage == child.name
    shutil.copytree(child, tmp_path / child.name)
    moved = tmp_path / parent.name
    shutil.copytree(parent, moved)
    hidden = parent.rename(parent.with_name("elsewhere"))
    try:
        chain = SavedRun(tmp_path / child.name).lineage()
        assert [ancestor.run for ancestor in chain] == [moved, tmp_path / child.name]
        assert chain[0].manifest is not None
        # Another checkpoint in the parent's place is not the parent.
        (checkpoint,) = RunDirectory(moved).checkpoints.iterdir()
        write_manifest(checkpoint, {**read_manifest(checkpoint), "created": "later"})
        chain = SavedRun(tmp_path / child.name).lineage()
        assert [ancestor.manifest is not None for ancestor in chain] == [False, True]
    finally:
        hidden.rename(parent)


def test_a_run_that_has_only_begun_or_was_only_evaluated(source: Path, tmp_path: Path):
    run = RunDirectory(write_run_of(source, tmp_path / "run"))
    scored(1, 2).save(run)
    text = write_report(run).read_text(encoding="utf-8")
    assert "Depth sweep" in text
    assert "training steps" not in text
    write_metrics(run, 1)
    text = write_report(run).read_text(encoding="utf-8")
    assert "training steps" in text
    assert "Lineage" not in text
    assert f"titan-loop eval {run.path} --tasks held_out --frontier" in text
