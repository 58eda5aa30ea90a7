"""Text to batches: the corpus, the two tokenizers, and a sampler whose every batch follows from (seed, step).

Nothing here knows the model or the loop.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from optpass.errors import ConfigError

#: Bytes of a token in a batch.
TOKEN_BYTES = 8
#: Part of a text in characters that need not be UTF-8: a word in another encoding here and there is no reason to stop.
_FOREIGN = 0.1
#: Folders below the standard library that are not its own sources, or are tests.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """Text, where it came from and what identifies it."""

    text: bytes
    source: str
    files: int

    @property
    def sha256(self) -> str:
        """Digest of the text: runs with equal digests saw the same data."""
        return hashlib.sha256(self.text).hexdigest()


def read_stdlib(limit: int) -> Corpus:
    """The `.py` sources of this Python's standard library in the order of their paths, at most `limit` bytes.

    Raises:
        ConfigError: the sources are not installed.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        (path.relative_to(root).as_posix(), path)
        for path in root.rglob("*.py")
        if not _SKIPPED.intersection(path.relative_to(root).parts)
    )
    parts: list[bytes] = []
    size = 0
    for _, path in paths:
        if size >= limit:
            break
        parts.append(path.read_bytes()[: limit - size])
        size += len(parts[-1])
    if not parts:
        raise ConfigError(f'data = "stdlib": no sources under {root}; give the path of a text file instead')
    return Corpus(b"".join(parts), "stdlib", len(parts))


def read_file(path: Path, limit: int) -> Corpus:
    """The first `limit` bytes of a file. Raises ConfigError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return Corpus(file.read(limit), str(path), 1)
    except FileNotFoundError:
        raise ConfigError(f'data = "{path}": no such file; give a text file, or "stdlib"') from None
    except OSError as error:
        raise ConfigError(f'data = "{path}": cannot be read: {error.strerror}; give a text file, or "stdlib"') from None


def check_characters(corpus: Corpus) -> None:
    """Raises ConfigError where a file does not hold characters in UTF-8, so that a token per character says nothing."""
    where = f'data = "{corpus.source}"'
    instead = 'give a text file in UTF-8, or set tokenizer = "byte", which takes any file'
    nul = corpus.text.find(b"\0")
    if nul >= 0:
        raise ConfigError(f'{where} is no text for tokenizer = "char": byte {nul} is NUL; {instead}')
    decoded = corpus.text.decode("utf-8", errors="replace")
    # The limit may have cut the last character, and nobody reads much from a text of three.
    foreign = decoded.count("\ufffd") - corpus.text.count("\ufffd".encode())
    if foreign > 1 + _FOREIGN * len(decoded):
        raise ConfigError(
            f'{where} is no text in UTF-8 for tokenizer = "char": {foreign:,} of {len(decoded):,} characters cannot be '
            f"read; {instead}"
        )


class Tokenizer(Protocol):
    """Text to token numbers and back."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens; every number is below it."""
        ...

    def encode(self, text: bytes) -> Tensor:
        """Token numbers [n], in the smallest dtype that holds them."""
        ...

    def decode(self, tokens: Tensor) -> bytes:
        """The text of token numbers [n]."""
        ...


class ByteTokenizer:
    """One token per byte: any text, 256 tokens."""

    vocabulary = 256

    def encode(self, text: bytes) -> Tensor:
        """Token numbers [n], uint8."""
        return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())

    def decode(self, tokens: Tensor) -> bytes:
        """The bytes of token numbers [n]."""
        return bytes(tokens.tolist())


class CharTokenizer:
    """One token per character (Unicode code point) that occurs in the text it was made from, in code point order."""

    def __init__(self, text: bytes) -> None:
        self._points = np.unique(_code_points(text))

    @property
    def vocabulary(self) -> int:
        """Number of different characters."""
        return len(self._points)

    def encode(self, text: bytes) -> Tensor:
        """Token numbers [n], int32. Raises ConfigError for a character that the tokenizer has not seen."""
        points = _code_points(text)
        tokens = np.searchsorted(self._points, points)
        known = self._points[np.minimum(tokens, len(self._points) - 1)] == points
        if not known.all():
            raise ConfigError(f"character {chr(int(points[~known][0]))!r} is not in the tokenizer's text")
        return torch.from_numpy(tokens.astype(np.int32))

    def decode(self, tokens: Tensor) -> bytes:
        """The text of token numbers [n], in UTF-8."""
        return "".join(chr(int(self._points[token])) for token in tokens.tolist()).encode()


def _code_points(text: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    # A byte limit may cut the last character, and old sources may be in Latin-1: neither is worth a failed run.
    return np.frombuffer(text.decode("utf-8", errors="replace").encode("utf-32-le"), dtype=np.uint32)


def make_tokenizer(kind: str, text: bytes) -> Tokenizer:
    """The tokenizer "byte" or "char" for a text."""
    return CharTokenizer(text) if kind == "char" else ByteTokenizer()


def stream_seed(*words: int) -> int:
    """A 32-bit seed for the stream named by `words`, e.g. (seed, step, micro-batch): unrelated for unequal words."""
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def parts(tokens: Tensor, *, sequence: int, holdout: float) -> tuple[Tensor, Tensor]:
    """The part to train on, and the held-out tail.

    Raises:
        ConfigError: either is shorter than one sequence and the token after it.
    """
    held = max(1, round(len(tokens) * holdout))
    found = tokens[: len(tokens) - held], tokens[len(tokens) - held :]
    for part, what in zip(found, ("training part", "held-out part"), strict=True):
        if len(part) <= sequence:
            raise ConfigError(
                f"sequence = {sequence}: the {what} of the text has {len(part)} tokens, and {sequence + 1} are "
                "needed; use a longer text, a larger data_limit or a shorter sequence"
            )
    return found


class Batches:
    """Batches from a training part and a held-out tail of the tokens.

    Training batches are drawn at random places that depend on (seed, step, micro-batch) and nothing else, so that two
    runs, or a run that starts again at step n, see the same.
    """

    def __init__(self, tokens: Tensor, *, sequence: int, batch: int, holdout: float, seed: int, device: str) -> None:
        """Raises ConfigError where either part is shorter than one sequence and the token after it."""
        self._train, self._held = parts(tokens, sequence=sequence, holdout=holdout)
        self._sequence, self._batch, self._seed, self._device = sequence, batch, seed, device

    def train(self, step: int, micro: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of one micro-batch, each [batch, sequence] int64."""
        generator = np.random.default_rng([self._seed, step, micro])
        return self._cut(self._train, generator.integers(len(self._train) - self._sequence, size=self._batch))

    def validation(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """At most `count` micro-batches spread evenly over the held-out tail; they overlap only where it is short."""
        places = len(self._held) - self._sequence
        rows = min(count * self._batch, places)
        starts = np.linspace(0, places - 1, rows).astype(np.int64)
        for i in range(0, rows, self._batch):
            yield self._cut(self._held, starts[i : i + self._batch])

    def _cut(self, tokens: Tensor, starts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(starts)[:, None] + torch.arange(self._sequence + 1)
        cut = tokens[rows].to(device=self._device, dtype=torch.int64)
        return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()
