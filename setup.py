"""The part of pyproject.toml that it cannot say: the wheel has the recipes inside the package."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["titan_loop*"]), "titan_loop.train_configs"],
    package_dir={"titan_loop.train_configs": "train_configs"},
)
