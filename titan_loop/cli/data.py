"""`titan-loop data VERB`: from text to prepared sources; a thin layer over `titan_loop.data`."""

from collections.abc import Sequence

from titan_loop.cli.data_plan import plan
from titan_loop.cli.parser import Parser
from titan_loop.cli.verbs import Verb, run_verb
from titan_loop.errors import UserError


def run(arguments: Sequence[str]) -> int:
    """Run one of the data verbs."""
    return run_verb("data", VERBS, arguments)


def local_python(arguments: Sequence[str]) -> None:
    """Build a three-domain corpus from this Python installation, without a network."""
    parser = Parser("data local-python", "Write OUTPUT/{code,prose,math}/{train,held_out}.jsonl.")
    parser.add_argument("output", help="folder of the corpus")
    for domain, megabytes in (("code", 12.0), ("prose", 8.0), ("math", 6.0)):
        parser.add_argument(
            f"--{domain}-megabytes", type=float, default=megabytes, help=f"most text of {domain}"
        )
    parser.add_argument(
        "--held-out-fraction", type=float, default=0.05, help="share of documents held out"
    )
    parser.add_argument(
        "--at-least-megabytes", type=float, default=0.0, help="fail with less text in all"
    )
    given = parser.parse(arguments)

    from titan_loop.demo.local_python import build_local_python_corpus

    build_local_python_corpus(
        given.output,
        code_megabytes=given.code_megabytes,
        prose_megabytes=given.prose_megabytes,
        math_megabytes=given.math_megabytes,
        held_out_fraction=given.held_out_fraction,
        at_least_megabytes=given.at_least_megabytes,
    )


def local_chats(arguments: Sequence[str]) -> None:
    """Build chats from the docstrings of this Python installation, without a network."""
    parser = Parser(
        "data local-chats",
        "Write OUTPUT/{train,held_out}.jsonl of questions and answers, for tokenize --chat.",
    )
    parser.add_argument("output", help="folder of the chats")
    parser.add_argument("--megabytes", type=float, default=1.0, help="most text")
    parser.add_argument(
        "--held-out-fraction", type=float, default=0.05, help="as given to local-python"
    )
    given = parser.parse(arguments)

    from titan_loop.demo.local_chats import build_local_chats

    build_local_chats(
        given.output, megabytes=given.megabytes, held_out_fraction=given.held_out_fraction
    )


def train_tokenizer(arguments: Sequence[str]) -> None:
    """Train a byte-level BPE on documents."""
    parser = Parser("data train-tokenizer", "Train a byte-level BPE and write its tokenizer.json.")
    _add_inputs(parser)
    parser.add_argument("--vocab-size", type=int, required=True, help="tokens in all")
    parser.add_argument("--output", required=True, help="where the tokenizer.json goes")
    given = parser.parse(arguments)

    from titan_loop.data.prepare import make_tokenizer

    path = make_tokenizer.train_tokenizer(
        given.inputs,
        vocab_size=given.vocab_size,
        output=given.output,
        text_key=given.text_key,
        format=given.format,
        patterns=given.pattern,
    )
    print(path)


def import_tokenizer(arguments: Sequence[str]) -> None:
    """Convert a tiktoken rank file to a tokenizer.json."""
    parser = Parser("data import-tokenizer", "Convert a tiktoken rank file to a tokenizer.json.")
    parser.add_argument("input", help="tiktoken rank file, or a tokenizer.json to copy")
    parser.add_argument("--output", required=True, help="where the tokenizer.json goes")
    parser.add_argument(
        "--split-pattern", help="the rank file's pre-tokenisation pattern, as its publisher says"
    )
    given = parser.parse(arguments)

    from titan_loop.data.prepare import make_tokenizer

    path = make_tokenizer.import_tokenizer(
        given.input, output=given.output, split_pattern=given.split_pattern
    )
    print(path)


def tokenize(arguments: Sequence[str]) -> None:
    """Prepare documents as a source: read, clean, tokenise, shuffle."""
    parser = Parser(
        "data tokenize",
        "Prepare documents with datatrove as a source that --dataloader.mixture reads. Give the "
        "same command again to go on with what was interrupted.",
    )
    _add_inputs(parser)
    parser.add_argument("--output", required=True, help="folder of the source")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="records are conversations, 'messages' or 'question' and 'answer': ChatML with masks",
    )
    parser.add_argument("--held-out-inputs", nargs="+", help="documents never trained on")
    parser.add_argument(
        "--held-out-fraction",
        type=float,
        default=0.01,
        help="share of documents held out, where neither --held-out-inputs nor held_out.jsonl is",
    )
    parser.add_argument("--dataset-config", help="configuration of a Hugging Face dataset")
    parser.add_argument(
        "--dataset-split", default="train", help="split of a Hugging Face dataset to read"
    )
    parser.add_argument("--eos-token", default="<|endoftext|>", help="ends every document")
    parser.add_argument(
        "--config", help="TOML file: deduplication, quality filters, decontamination, cluster"
    )
    parser.add_argument("--executor", default="local", help="local, slurm or ray")
    parser.add_argument("--tasks", type=int, default=1, help="parts the work is cut into")
    parser.add_argument("--workers", type=int, default=1, help="tasks that run at the same time")
    parser.add_argument(
        "--max-malformed",
        type=float,
        default=0.01,
        help="largest share of records that may be malformed or lack their text",
    )
    parser.add_argument("--licence", default="not stated", help="noted in source.json")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a complete or unfinished source"
    )
    given = parser.parse(arguments)

    from titan_loop.data.prepare.tokenize_source import tokenize_source

    tokenize_source(
        given.inputs,
        given.output,
        tokenizer_path=given.tokenizer,
        held_out_inputs=given.held_out_inputs,
        held_out_fraction=given.held_out_fraction,
        format=given.format,
        patterns=given.pattern,
        dataset_config=given.dataset_config,
        dataset_split=given.dataset_split,
        eos_token=given.eos_token,
        text_key=given.text_key,
        chat=given.chat,
        config_path=given.config,
        executor=given.executor,
        tasks=given.tasks,
        workers=given.workers,
        max_malformed=given.max_malformed,
        licence=given.licence,
        overwrite=given.overwrite,
    )


def pack(arguments: Sequence[str]) -> None:
    """Pack whole documents into windows, best fit first."""
    parser = Parser(
        "data pack",
        "Put the whole documents of a prepared source into windows, best fit first, and store "
        "which: for long contexts and chats, which should not be cut.",
    )
    parser.add_argument("source", help="folder of the source")
    parser.add_argument("--seq-len", type=int, required=True, help="tokens predicted per window")
    parser.add_argument(
        "--long-documents",
        choices=("refuse", "split"),
        default="refuse",
        help="what to do with documents longer than a window",
    )
    given = parser.parse(arguments)

    from titan_loop.data.prepare.packing import pack_source

    pack_source(given.source, given.seq_len, long_documents=given.long_documents)


def show(arguments: Sequence[str]) -> None:
    """Print documents of a prepared source as the model reads them."""
    parser = Parser(
        "data show",
        "Print documents of a prepared source, special tokens written out; where there is a loss "
        "mask, targets stand in ⟦ ⟧.",
    )
    parser.add_argument("source", help="folder of the source")
    parser.add_argument("--count", type=int, default=3, help="documents to print")
    parser.add_argument(
        "--split", default="train", choices=("train", "held_out"), help="of the source"
    )
    given = parser.parse(arguments)

    from titan_loop.data.prepare.show import show_source

    for document in show_source(given.source, given.count, given.split):
        targets = "" if document.targets is None else f", {document.targets} targets"
        print(
            f"--- document {document.number}: {document.tokens} tokens from token "
            f"{document.first_token} on{targets}"
        )
        print(document.text)


def verify(arguments: Sequence[str]) -> None:
    """Check a prepared source's files and ids against its card."""
    parser = Parser(
        "data verify",
        "Read all of a prepared source and name every file that is not what source.json says.",
    )
    parser.add_argument("source", help="folder of the source")
    given = parser.parse(arguments)

    from titan_loop.data.prepare.verify import verify_source

    faults = 0
    for fault in verify_source(given.source):
        faults += 1
        print(fault)
    if faults:
        raise UserError(
            f"source {given.source} has {faults} faults: restore these files or prepare it again"
        )
    print(f"{given.source}: sound")


def _add_inputs(parser: Parser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        help="JSONL (plain, gz, zst), Parquet or text files, or folders of one of these",
    )
    parser.add_argument(
        "--format", default="auto", help="auto (by name), jsonl, parquet, text or huggingface"
    )
    parser.add_argument(
        "--pattern", nargs="+", default=(), help="of files in folders, e.g. '*.py' '*.md'"
    )
    parser.add_argument("--text-key", default="text", help="field that holds a document's text")


VERBS: dict[str, Verb] = {
    "local-python": local_python,
    "local-chats": local_chats,
    "train-tokenizer": train_tokenizer,
    "import-tokenizer": import_tokenizer,
    "tokenize": tokenize,
    "pack": pack,
    "show": show,
    "verify": verify,
    "plan": plan,
}
