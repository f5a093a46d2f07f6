"""Recipes: one module a paper or purpose, one public function a recipe.

`titan-loop train NAME` finds the function NAME; any field can be overridden on the command
line. LOG.md records what the recipes gave, failures included.
"""
