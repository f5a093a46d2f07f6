"""What one preparation is: its inputs, settings and folders, the same in every stage."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from titan_loop import __version__
from titan_loop.data.prepare.config import PrepareConfig
from titan_loop.data.prepare.documents import Documents
from titan_loop.errors import UserError

SPLITS = ("train", "held_out")


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """Everything the stages and the card need; it is pickled into SLURM jobs.

    The fields are the arguments of `titan_loop.data.prepare.tokenize_source.tokenize_source`,
    resolved: `output` is absolute, and `tasks` at most the number of files.
    """

    output: Path
    documents: Documents
    config: PrepareConfig
    held_out_fraction: float
    eos_token: str
    text_key: str
    chat: bool
    tasks: int
    max_malformed: float
    licence: str
    command: str

    @property
    def work(self) -> Path:
        """The folder of what stages hand to each other, removed at the end."""
        return self.output / "work"

    @property
    def dropped_examples(self) -> Path:
        """The folder of the first records each task dropped."""
        return self.output / "logs" / "dropped"

    def logs(self, stage: str) -> Path:
        """Return datatrove's folder for one stage."""
        return self.output / "logs" / stage

    @property
    def holds_out(self) -> bool:
        """Whether there is a held-out split."""
        return bool(self.documents.held_out_files) or self.held_out_fraction > 0

    def versions(self) -> dict[str, str]:
        """Return the versions of the tools that decide what is stored.

        Raises:
            UserError: If cleaning needs a package that is not installed.
        """
        names = ["datatrove", "tokenizers", "numpy"]
        names += ["spacy"] if self.config.cleaning() else []
        names += ["lm_eval"] if self.config.decontaminate else []
        try:
            return {"titan_loop": __version__, **{name: version(name) for name in names}}
        except PackageNotFoundError as error:
            raise UserError(
                f"cleaning needs {error.name}, which is not installed: "
                "pip install 'titan-loop[clean]'"
            ) from error
