"""Serves the page, its packages and an exported ONNX folder, on this machine alone; see run.sh.

python tools/demo/browser/serve.py PACKAGES MODEL [PORT]
"""

import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Handler(SimpleHTTPRequestHandler):
    """Three folders as one."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def __init__(self, *args: object, packages: Path, model: Path) -> None:
        self.folders = {"packages": packages, "model": model}
        super().__init__(*args, directory=str(HERE))  # type: ignore[arg-type]

    def translate_path(self, path: str) -> str:
        """Return the file of a URL."""
        own = Path(super().translate_path(path)).relative_to(HERE)
        folder = self.folders.get(own.parts[0]) if own.parts else None
        return str(HERE / own if folder is None else folder.joinpath(*own.parts[1:]))

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of what was found."""


def serving(packages: Path, model: Path, port: int) -> ThreadingHTTPServer:
    """Return a server that is not running yet; port 0 is any free one."""
    handler = partial(Handler, packages=packages, model=model)
    return ThreadingHTTPServer(("127.0.0.1", port), handler)


def main() -> int:
    """Serve until interrupted."""
    packages, model, *port = sys.argv[1:]
    if not Path(model, "model.onnx").is_file():
        line = f"{model} has no model.onnx; write it with titan-loop convert export RUN --to onnx"
        print(f"titan-loop: error: {line}", file=sys.stderr)
        return 2
    if not Path(model, "tokenizer.json").is_file():
        line = f"{model} has no tokenizer.json; export it again without --no-tokenizer"
        print(f"titan-loop: error: {line}", file=sys.stderr)
        return 2
    server = serving(Path(packages), Path(model), int(*port or [8000]))
    print(f"http://127.0.0.1:{server.server_port}/, until Ctrl-C")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
