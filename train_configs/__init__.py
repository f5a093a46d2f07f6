"""The studies: a folder for each paper or purpose.

NAME/__init__.py    the record of its tasks, analyses and objectives (`titan_loop/plugins.py`)
NAME/recipes.py     one public function for each recipe, which `titan-loop train` finds by name
NAME/README.md      what its runs showed, failures included
NAME/results/       a small JSON for each finished run; NAME/plots/ is drawn from them
"""
