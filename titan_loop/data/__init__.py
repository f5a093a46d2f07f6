"""From raw text to training batches whose order is a pure function of (seed, windows consumed).

    prepare/    documents ─► pipelines (datatrove) ─► source.json, then packing
       │        source_card, shards, packed_index, open_files: a prepared source, read by both
    load/       windows ─► mixture ─► loader ─► global batches
    tasks/      examples that are generated instead
    columns     further columns of batches, beside tokens, positions and labels

A *source* is one tokenised data set: a folder with `train/*.ds`, `held_out/*.ds`, `tokenizer.json`
and `source.json`. A *window* is L + 1 tokens cut from a source's stored stream. The only state of a
running loader is how many windows the whole job has consumed; nothing here depends on the number of
ranks. `inspect_source` shows and verifies a source. This package imports nothing by itself, so that
command lines start fast: import the modules.
"""
