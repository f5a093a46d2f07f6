"""A tokenizer, and transformers where its environment has it."""

from tests.families.conftest import transformers  # noqa: F401
from tests.families.ouro.hugging_face.conftest import tokenizer_file  # noqa: F401
