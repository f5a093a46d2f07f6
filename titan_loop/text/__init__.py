"""Text and tokens: loading a tokenizer, special tokens, conversations.

    record ─► Conversation ─► ChatTemplate: text, answers ─► ChatEncoder: ids, targets

`data/prepare/make_tokenizer.py` makes one: by training, or from a rank file.
"""
