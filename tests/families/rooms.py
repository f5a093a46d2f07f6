"""The families that have a folder, for tests that hold for each; a deleted one drops out."""

from titan_loop.models.family import ModelOptions, Use, get_family
from titan_loop.plugins import FAMILIES, _known, names


def families(*uses: Use) -> dict[str, ModelOptions]:
    """Return the default options of our families whose models have all these uses, by name."""
    places = {name: str(_known["families"][name]) for name in names("families")}
    ours = [name for name, place in places.items() if place.startswith(FAMILIES)]
    found = {name: get_family(name) for name in ours}
    return {name: family.options() for name, family in found.items() if family.uses >= {*uses}}
