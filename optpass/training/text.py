"""The text of a training file and its tokens, before a model is built: a run trains on them, and a plan asks of them.

Reading and cutting are `data`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from optpass.backend.model_tensors import memory_bytes
from optpass.errors import ConfigError
from optpass.training import data
from optpass.training.config import Job
from optpass.units import format_bytes


@dataclass(frozen=True)
class Text:
    """The text that a training file names, in tokens [n], of `vocabulary` different ones at most."""

    corpus: data.Corpus
    tokens: Tensor
    vocabulary: int


def read(job: Job) -> Text:
    """Read the text and check that it has room for a sequence.

    Raises:
        ConfigError: it cannot be read, is no text where characters are asked for, or is too short.
    """
    config = job.config
    try:
        corpus = _corpus(job)
        tokenizer = data.make_tokenizer(config.tokenizer, corpus.text)
        tokens = tokenizer.encode(corpus.text)
        data.parts(tokens, sequence=config.sequence, holdout=config.holdout)
    except ConfigError as error:
        raise ConfigError(f"{job.path}: [training] {error}") from None
    return Text(corpus, tokens, tokenizer.vocabulary)


def batches(job: Job, text: Text) -> data.Batches:
    """The batches of a run, whose micro-batch must be a number.

    Raises:
        ConfigError: the tokens of one are more than this machine can hold.
    """
    config = job.config
    needed, there = data.TOKEN_BYTES * config.samples * (config.sequence + 1), memory_bytes()
    if 0 < there < needed:
        raise ConfigError(
            f"{job.said('micro_batch')}: its tokens alone take {format_bytes(needed)}, and this machine has "
            f"{format_bytes(there)}; make it smaller, and take more of them for a step with accumulation"
        )
    return data.Batches(
        text.tokens, sequence=config.sequence, batch=config.samples, holdout=config.holdout, seed=config.seed,
        device=config.device,
    )  # fmt: skip


def _corpus(job: Job) -> data.Corpus:
    if job.config.data == "stdlib":
        return data.read_stdlib(job.config.limit_bytes)
    corpus = data.read_file(job.path.parent / job.config.data, job.config.limit_bytes)
    if job.config.tokenizer == "char":
        data.check_characters(corpus)
    return corpus
