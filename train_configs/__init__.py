"""The recipes: one module for each paper or purpose, one public function for each recipe.

`titan-loop train NAME` finds the function NAME; flags override any field. LOG.md has the results,
failures included.
"""

import titan_loop.compat  # noqa: F401  before a recipe imports torchtitan
