"""What a run says about its model where the options do not."""

from titan_loop.models.sizes import ModelOptions, size_notes


def test_a_size_with_another_shape_says_what_differs():
    vocabulary, size = size_notes(ModelOptions(size="53m", n_layers=5), 1024)
    assert vocabulary == "model.vocab_size=1024, the vocabulary of the data"
    # As Ouro prints it: 53,228,545 parameters; every layer has 4 D² + 3 D F + 4 D of them.
    layer = 4 * 512**2 + 3 * 512 * 1536 + 4 * 512
    here = 53_228_545 - layer - 2 * 512 * (32_000 - 1024)
    assert size == (
        f"model.size=53m has {here:,} parameters here, and 53,228,545 as named: "
        "n_layers=5 instead of 6, vocab_size=1024 instead of 32000"
    )


def test_a_size_as_named_says_nothing():
    assert not list(size_notes(ModelOptions(size="quickstart", vocab_size=1024), 1024))
