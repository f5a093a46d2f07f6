"""Text and tokens: loading a tokenizer, special tokens, ChatML."""
