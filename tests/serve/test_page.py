"""The page in a real Chromium: `page.mjs` acts, and this starts and kills its server."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.conftest import until
from tests.support.multiprocess import preloaded_context
from titan_loop.cli.main import main

FLAGS = ("--context", "4096", "--max-tokens", "4000", "--recurrent-steps", "4")


def serve(run: Path, port: int) -> None:
    from titan_loop.inference.loading import TextEnds

    TextEnds.stop_tokens = property(lambda self: frozenset())  # random weights end soon
    sys.exit(main(["serve", str(run), "--port", str(port), *FLAGS]))


@pytest.mark.browser
def test_a_person_at_the_page(trained_run):
    chromium, node = shutil.which("chromium"), shutil.which("node")
    if chromium is None or node is None or "TITAN_LOOP_NODE_MODULES" not in os.environ:
        pytest.skip("needs Chromium and node: tools/test_page.sh")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def start():
        child = preloaded_context().Process(target=serve, args=(trained_run, port))
        child.start()
        with socket.socket() as probe:
            until(lambda: probe.connect_ex(("127.0.0.1", port)) == 0)
        return child

    server = start()
    screenshots = os.environ.get("TITAN_LOOP_SCREENSHOTS", "")
    script = Path(__file__).with_name("page.mjs")
    person = subprocess.Popen(
        [node, script, f"http://127.0.0.1:{port}", chromium, screenshots],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert person.stdin is not None
    assert person.stdout is not None
    with person:
        said = []
        for line in person.stdout:
            said.append(line.strip())
            if line.strip() == "lose":
                server.kill()
                server.join()
            elif line.strip() == "back":
                server = start()
            person.stdin.write("\n")
            person.stdin.flush()
    server.kill()
    server.join()
    assert person.returncode == 0, said
    assert said == ["lose", "back", "done"]
