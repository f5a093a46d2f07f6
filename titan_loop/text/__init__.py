"""Text and tokens: loading a tokenizer, special tokens, ChatML.

`data/prepare/make_tokenizer.py` makes one: by training, or from a rank file.
"""
