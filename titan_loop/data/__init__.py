"""From raw text to training batches whose order is a pure function of (seed, windows consumed).

    raw documents ──► prepared source ──► windows ──► mixture ──► batches
    documents         prepare, stages     windows     mixture     loader
    local_python      pipeline_steps      packing     permutation batches
    tokenizer         chatml              shards      changes     synthetic.mano
    prepare_config    finish, source_card packed_windows          text_stream

A *source* is one tokenised data set: a folder with `train/*.ds`, `held_out/*.ds`, `tokenizer.json`
and `source.json`. A *window* is L + 1 tokens cut from a source's stored stream. The only state of a
running loader is how many windows the whole job has consumed; nothing here depends on the number of
ranks. Nothing is imported by this package itself, so that command lines start fast: import the
modules.
"""
