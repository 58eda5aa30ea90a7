"""Corpus, tokenizers and sampler: the same bytes, the same tokens and the same batches every time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optpass.errors import ConfigError
from optpass.training.data import (
    Batches,
    ByteTokenizer,
    CharTokenizer,
    Corpus,
    check_characters,
    make_tokenizer,
    read_file,
    read_stdlib,
    stream_seed,
)


def batches(length: int = 1000, *, seed: int = 0, sequence: int = 16, batch: int = 4, holdout: float = 0.1) -> Batches:
    tokens = torch.arange(length, dtype=torch.int32)
    return Batches(tokens, sequence=sequence, batch=batch, holdout=holdout, seed=seed, device="cpu")


def test_stdlib_is_capped_repeatable_and_has_no_tests() -> None:
    corpus = read_stdlib(300_000)
    assert len(corpus.text) == 300_000
    assert corpus.sha256 == read_stdlib(300_000).sha256
    assert read_stdlib(1000).text == corpus.text[:1000]
    assert corpus.files > 3 and b"import" in corpus.text


def test_file_is_capped_and_a_missing_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abcdef")
    assert read_file(path, 4).text == b"abcd"
    with pytest.raises(ConfigError, match=r"none\.txt.*no such file"):
        read_file(tmp_path / "none.txt", 4)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(tmp_path, 4)


@pytest.mark.parametrize("kind", ["byte", "char"])
def test_tokenizers_round_trip(kind: str) -> None:
    text = "def f(x): return 'naïve – 𝜆'\n\t".encode()
    tokenizer = make_tokenizer(kind, text)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert int(tokens.min()) >= 0 and int(tokens.max()) < tokenizer.vocabulary
    assert len(tokens) == (len(text) if kind == "byte" else len(text.decode()))


def test_byte_vocabulary_is_every_byte() -> None:
    text = bytes(range(256))
    assert ByteTokenizer().encode(text).tolist() == list(range(256))
    assert ByteTokenizer().vocabulary == 256


def test_char_vocabulary_is_the_characters_of_its_text() -> None:
    tokenizer = CharTokenizer(b"hello")
    assert tokenizer.vocabulary == 4
    assert tokenizer.encode(b"hole").tolist() == [1, 3, 2, 0]
    with pytest.raises(ConfigError, match="'z' is not in"):
        tokenizer.encode(b"hz")


def test_char_takes_text_cut_within_a_character_and_other_encodings() -> None:
    for text in ("é".encode()[:1], "é".encode("latin-1") + b"x"):
        tokenizer = CharTokenizer(text)
        assert int(tokenizer.encode(text).max()) < tokenizer.vocabulary


def test_a_file_that_is_no_text_is_refused_for_characters() -> None:
    def corpus(text: bytes) -> Corpus:
        return Corpus(text, "x.bin", 1)

    with pytest.raises(ConfigError, match=r'data = "x\.bin" is no text .*: byte 3 is NUL; give a text file in UTF-8'):
        check_characters(corpus(b"abc\0" * 9))
    cyrillic = "в чащах юга жил бы цитрус? " * 9
    with pytest.raises(ConfigError, match=r'is no text in UTF-8 .* of 243 characters cannot be read; .* "byte"'):
        check_characters(corpus(cyrillic.encode("koi8-r")))
    for text in (
        cyrillic.encode(),
        cyrillic.encode()[:-3],
        "é".encode()[:1],
        ("naïve and more " * 9).encode("latin-1"),
    ):
        check_characters(corpus(text))  # an accent here and there, or a cut last character, is worth no failed run


def test_batches_depend_on_seed_step_and_micro_batch_only() -> None:
    first, second = batches(), batches()
    second.train(9, 0)  # what was drawn before has no say
    for step, micro in ((0, 0), (0, 1), (5, 0)):
        a, b = first.train(step, micro), second.train(step, micro)
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    draws = [
        tuple(batches(seed=s).train(i, m)[0][:, 0].tolist()) for s, i, m in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))
    ]
    assert len(set(draws)) == 4


def test_targets_are_the_next_tokens_and_training_never_sees_the_tail() -> None:
    source = batches(length=200)
    for step in range(100):
        tokens, targets = source.train(step, 0)
        assert tokens.dtype == torch.int64 and tokens.shape == (4, 16)
        assert torch.equal(targets, tokens + 1)
        assert int(targets.max()) < 180


def test_validation_stays_in_the_tail_and_covers_it() -> None:
    pairs = list(batches(length=1000).validation(2))
    assert [tuple(tokens.shape) for tokens, _ in pairs] == [(4, 16), (4, 16)]
    seen = torch.cat([tokens for tokens, _ in pairs])
    assert int(seen.min()) == 900 and all(int(targets.max()) <= 999 for _, targets in pairs)
    assert len(set(seen[:, 0].tolist())) == 8


def test_every_last_token_can_be_drawn() -> None:
    tokens = torch.arange(30)
    source = Batches(tokens, sequence=9, batch=64, holdout=0.34, seed=0, device="cpu")  # 20 to train, 10 held out
    starts = {int(s) for step in range(4) for s in source.train(step, 0)[0][:, 0]}
    assert starts == set(range(11))
    assert [targets.max().item() for _, targets in source.validation(4)] == [29]


@pytest.mark.parametrize(("length", "part"), [(16, "training part"), (100, "held-out part")])
def test_text_shorter_than_a_sequence_is_an_error(length: int, part: str) -> None:
    with pytest.raises(ConfigError, match=f"sequence = 16: the {part}.*17 are needed"):
        batches(length=length, holdout=0.1)


def test_stream_seeds_differ() -> None:
    seeds = {stream_seed(0, step, micro, 1) for step in range(50) for micro in range(4)}
    assert len(seeds) == 200 and all(0 <= seed < 2**32 for seed in seeds)
