"""Flags for the stages of a recipe: `--FIELD` for all of them, `--stages.NAME.FIELD` for one."""

from collections.abc import Sequence

from titan_loop.cli.overrides import apply_overrides
from titan_loop.errors import UserError, nearest
from titan_loop.recipes.recipe import Recipe

PREFIX = "--stages."


def apply_to_stages(
    recipe: Recipe, flags: Sequence[str], program: str, *, only: str | None = None
) -> None:
    """Set fields of the stages' configs; what is said of one stage wins over what is said of all.

    Args:
        recipe: Its configs are replaced.
        flags: As `apply_overrides` takes them. The words after a flag for one stage, up to the next
            flag, belong to it.
        program: How `--help` calls the command.
        only: The one stage whose config is wanted; the others stay as they are.

    Raises:
        UserError: For an unknown stage or field, with the nearest ones, a value that does not fit,
            or a flag for a stage that is not wanted.
        SystemExit: With code 0, after `--help` was printed.
    """
    names = [stage.name for stage in recipe.stages]
    common, own = split_by_stage(flags, names)
    if only is not None:
        useless = next((name for name in own if name != only), None)
        if useless is not None:
            raise UserError(
                f"{PREFIX}{useless}.{own[useless][0].removeprefix('--')} has no effect with "
                f"--stage {only}; leave one of them out"
            )
    for stage in recipe.stages if only is None else [recipe.stage(only)]:
        stage.config = apply_overrides(stage.config, common, program)
        try:
            stage.config = apply_overrides(stage.config, own.get(stage.name, []), program)
        except UserError as error:
            raise UserError(f"stage {stage.name}: {error}") from error


def split_by_stage(
    flags: Sequence[str], names: Sequence[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the flags for all stages, and those for single ones without their prefix.

    Args:
        flags: Flags and values.
        names: Of the stages. They may contain dots; `_` and `-` are alike, as in fields.

    Raises:
        UserError: For a stage that does not exist, or a flag that names no field of it.
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


def _stage_and_field(word: str, names: Sequence[str]) -> tuple[str, str]:
    rest = word.removeprefix(PREFIX)
    found = [name for name in names if _plain(rest).startswith(f"{_plain(name)}.")]
    if not found:
        path = rest.partition("=")[0]
        raise UserError(
            f"{PREFIX}{path} names no stage's field, as {PREFIX}STAGE.FIELD would"
            + nearest(path.partition(".")[0], names)
        )
    # A name may begin with another one; and a spelling that is exact wins over one that is alike.
    name = max(found, key=lambda name: (len(name), rest.startswith(name)))
    field = rest[len(name) + 1 :]
    if not field.partition("=")[0]:
        raise UserError(f"{word} names no field of stage {name}; write {PREFIX}{name}.FIELD")
    return name, field


def _plain(name: str) -> str:
    return name.replace("_", "-")
