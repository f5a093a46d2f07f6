"""HRM-Text: two stacks, a fast and a slow one, that add to each other's states; PrefixLM."""

from titan_loop.plugins import Plugin, register

_HERE = "titan_loop.families.hrm_text"

register(
    Plugin(
        families={"hrm_text": f"{_HERE}.model:HRM_TEXT"},
        formats={"hrm_text": f"{_HERE}.formats:HRM_TEXT_FOLDER"},
    )
)
