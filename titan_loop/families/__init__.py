"""One folder for each family of looped models; deleting a family is deleting its folder.

    NAME/__init__.py its record: names of its parts (`titan_loop/plugins.py`) NAME/model.py options,
    named sizes, architecture (`titan_loop/models/family.py`) NAME/objective.py task.py analysis.py
    …: parts that no other family uses NAME/README.md equation, symbols, the paper's numbers,
    commands

A record names modules and imports none of them. A part moves down into the core when a second
family uses it.
"""
