"""The part of pyproject.toml that it cannot say: the wheel has the studies inside the package."""

from setuptools import find_packages, setup

studies = [f"titan_loop.{name}" for name in find_packages(include=["train_configs*"])]
setup(
    packages=[*find_packages(include=["titan_loop*"]), *studies],
    package_dir={"titan_loop.train_configs": "train_configs"},
)
