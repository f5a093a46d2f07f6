"""The toy family on the toy task is planned."""

from titan_loop.cli import main

RECIPE = "tests.families.toy_recipe:toy"


def test_the_toy_is_planned(capfd):
    assert main.main(["plan", RECIPE, "--nodes", "1", "--gpus-per-node", "4"]) == 0
    out = capfd.readouterr().out
    assert "update norm" in out  # its own unit travels
