"""Ouro and Hugging Face folders, both ways.

    import   config.json ─► OuroShape ─► the tensors there must be ─┐
             *.safetensors ─► read one at a time ───────────────────┴─► write_checkpoint

    export   manifest ─► OuroShape ─► config.json, generation_config.json, README.md
             CheckpointReader ─► one tensor at a time ─► *.safetensors
             tokenizer.json ─► the same vocabulary, chat template; `remote_code/`

Source: the format of the released Ouro models (arXiv 2510.25741), as independent loaders read it.
"""
