"""A recipe with flags: `--FIELD` for all of its stages, `--stages.NAME.FIELD` for one.

`train`, `plan`, `data plan` and `slurm submit` resolve a recipe here, so that all of them see the
same stages.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from titan_loop.errors import UserError, nearest
from titan_loop.recipes.registry import load_recipe

if TYPE_CHECKING:
    from titan_loop.recipes.recipe import Recipe

PREFIX = "--stages."


def resolve_recipe(
    name: str,
    flags: Sequence[str],
    *,
    verb: str = "train",
    only: str | None = None,
    prepare: Callable[["Recipe"], object] = lambda recipe: None,
) -> "Recipe":
    """Return a recipe with the flags applied to its stages; raise as `apply_to_stages` does.

    Args:
        only: Name of the only stage to set. If its flags name the checkpoint to start from, it is
            a fork and no longer waits for its parent.
        prepare: Changes the recipe before the flags do.
    """
    recipe = load_recipe(name)
    recipe.words = (name, *flags)
    prepare(recipe)
    apply_to_stages(recipe, flags, f"titan-loop {verb} {name}", only=only)
    if only is not None and (stage := recipe.stage(only)).config.checkpoint.carry.parent:
        recipe.is_fork = stage.parent is not None
        stage.parent = None
    return recipe


def apply_to_stages(
    recipe: "Recipe", flags: Sequence[str], program: str, *, only: str | None = None
) -> None:
    """Set fields of the stages' configs; a flag for one stage wins over a flag for all.

    Args:
        flags: As `apply_overrides` takes them. The words after a flag for one stage, up to the next
            flag, belong to it.
        only: Name of the only stage to set; a flag for another one is refused.

    Raises:
        SystemExit: With code 0, after `--help` was printed.
    """
    from titan_loop.cli.overrides import apply_overrides  # imports torch

    common, own = split_by_stage(flags, [stage.name for stage in recipe.stages])
    useless = next((name for name in own if only not in (None, name)), None)
    if useless is not None:
        raise UserError(
            f"{PREFIX}{useless}.{own[useless][0].removeprefix('--')} has no effect with --stage "
            f"{only}; leave one of them out"
        )
    for stage in recipe.chosen(only):
        stage.config.dump_folder = recipe.folder or f"runs/{recipe.name}"  # --help shows it
        stage.config = apply_overrides(stage.config, common, program)
        try:
            stage.config = apply_overrides(stage.config, own.get(stage.name, []), program)
        except UserError as error:
            raise UserError(f"stage {stage.name}: {error}") from error
        if stage.config.total_flops is not None:
            from titan_loop.training.flop_budget import within_budget  # imports torch

            stage.config = within_budget(stage.config)


def split_by_stage(
    flags: Sequence[str], names: Sequence[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the flags for all stages, and the flags for single ones without their prefix.

    Names of stages may contain dots; `_` and `-` are equivalent, as in fields.
    """
    common: list[str] = []
    own: dict[str, list[str]] = {}
    target = common
    for word in flags:
        if word.startswith(PREFIX):
            name, field = _stage_and_field(word, names)
            target = own.setdefault(name, [])
            target.append(f"--{field}")
            continue
        if word.startswith("--"):
            target = common
        target.append(word)
    return common, own


def flags_of_stage(flags: Sequence[str], names: Sequence[str], name: str) -> list[str]:
    """Return the flags for all stages, then the flags for one, which keep their prefix."""
    common, own = split_by_stage(flags, names)
    start = f"{PREFIX}{name}."
    return common + [w.replace("--", start, 1) if w[:2] == "--" else w for w in own.get(name, [])]


def _stage_and_field(word: str, names: Sequence[str]) -> tuple[str, str]:
    rest = word.removeprefix(PREFIX)
    found = [name for name in names if _plain(rest).startswith(f"{_plain(name)}.")]
    if not found:
        path = rest.partition("=")[0]
        raise UserError(
            f"{PREFIX}{path} does not begin with a stage; write {PREFIX}STAGE.FIELD"
            + nearest(path.partition(".")[0], names)
        )
    # A name may begin with another one, and an exact spelling wins over an equivalent one.
    name = max(found, key=lambda name: (len(name), rest.startswith(name)))
    field = rest[len(name) + 1 :]
    if not field.partition("=")[0]:
        raise UserError(f"{word} names no field of stage {name}; write {PREFIX}{name}.FIELD")
    return name, field


def _plain(name: str) -> str:
    return name.replace("_", "-")
