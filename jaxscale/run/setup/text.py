"""Text of a run: tokenizer, train and held-out splits, validation sets."""

import concurrent.futures
import dataclasses
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax

from jaxscale import config as configs
from jaxscale import run_folder
from jaxscale.choices import check_kind
from jaxscale.config import Config, DataConfig
from jaxscale.config.model import ModelSettings
from jaxscale.data.dataset import Dataset, Examples, open_validation
from jaxscale.data.mixture import open_examples
from jaxscale.data.tokens.corpus import open_corpus
from jaxscale.data.tokens.image_tokens import without_unread
from jaxscale.data.tokens.stop_ids import ResponseEnds, find_response_ends, with_stop_ids
from jaxscale.data.tokens.tokenizer import (
    Tokenizer,
    begin_texts,
    from_file,
    load_tokenizer,
    save_tokenizer,
)
from jaxscale.distributed import processes
from jaxscale.hugging_face.model_folder import copy_special_ids
from jaxscale.storage.local_tier import CHECKPOINTS, local_steps


class UnusableTokensError(ValueError):
    """A file of tokens changed during training (exit status 2), or cannot be read (status 1)."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.exit_status = 1 if isinstance(error, OSError) else 2


@dataclass(frozen=True)
class Text:
    """A run's tokenizer, its splits, and its validation sets by name; `heldout` is None if no text
    is held out."""

    tokenizer: Tokenizer
    train: Examples
    heldout: Examples | None
    validation: Mapping[str, Examples] = field(default_factory=dict)
    response_ends: ResponseEnds = field(default_factory=ResponseEnds)
    # Running verifications of tokens on disk.
    verification: tuple[concurrent.futures.Future, ...] = field(default=(), repr=False)

    def check_tokens(self) -> None:
        """Raises the failure of a finished verification; to be called now and then.

        Raises:
          UnusableTokensError: a file of tokens has changed since it was written, or cannot be read.
        """
        for outcome in self.verification:
            if outcome.done() and (error := outcome.exception()):
                raise UnusableTokensError(error)

    @property
    def evaluations(self) -> dict[str, Examples]:
        """Name -> the examples to evaluate on; the held-out text's name is ""."""
        return ({"": self.heldout} if self.heldout else {}) | dict(self.validation)


def open_tokenizer(config: Config, workdir: pathlib.Path) -> Tokenizer:
    """Opens the tokenizer of a started run, without its text.

    Raises:
      FileNotFoundError: the tokenizer trained for this run is missing from its folder.
      ValueError: the tokenizer cannot be used with this model; names the setting.
    """
    name, path = config.data.tokenizer, workdir / "tokenizer.json"
    if name.startswith("bpe:") and not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing, the tokenizer of the run, data.tokenizer = {name!r}; restore the "
            "file"
        )
    tokenizer = _kept(name, workdir) or load_tokenizer(name, directory=workdir, keep=True)
    return _fitting(tokenizer, config.data, config.model)


def open_text(config: Config, workdir: str | pathlib.Path) -> Text:
    """Opens the text that `config.data` names; tokenises it into `workdir` the first time.

    Returns:
      A record with the `tokenizer`, the splits `train` and `heldout` (None where nothing is held
      out), and `validation`, sets by name.

    Raises:
      ValueError: the data cannot be used with this model; names the setting.

    Examples:
      >>> text = jaxscale.open_text(jaxscale.load("tiny"), "runs/text")
      >>> text.train[0].tokens.shape, text.tokenizer.decode([72, 105])
      ((64,), 'Hi')
    """
    check_kind("config", config, Config, configs.CONFIG_ADVICE)
    data, workdir = config.data, pathlib.Path(workdir)
    if config.model.num_encoder_layers and not data.target_len:
        raise ValueError(
            f"model.family = {config.model.family!r} has an encoder, of data.seq_len = "
            f"{data.seq_len} tokens, and a decoder; set data.target_len, the tokens of the "
            f"decoder, and data.objective to {' or '.join(configs.PAIRED_OBJECTIVES)}"
        )
    tokenizer = _kept(data.tokenizer, workdir) or load_tokenizer(
        data.tokenizer,
        data.source,
        workdir,
        heldout=data.heldout,
        seed=data.seed,
        # A run with weights needs their tokenizer; other processes need the one that the first
        # process has just saved.
        keep=bool(local_steps(workdir / CHECKPOINTS)) or not processes.first_of_all(),
    )
    tokenizer = _fitting(tokenizer, data, config.model)
    if data.tokenizer.startswith("bpe:"):
        save_tokenizer(tokenizer, workdir)
    corpus = open_corpus(data.source, tokenizer, workdir / "tokens")
    response_ends = find_response_ends(corpus, tokenizer)
    tokenizer = with_stop_ids(tokenizer, response_ends.stop_ids)
    share = jax.process_index(), jax.process_count()
    verification = [corpus.verify(*share)]
    size = config.model.vocab_size
    train = open_examples(data, tokenizer, corpus, split="train", vocab_size=size)
    heldout = None
    if data.heldout or (config.run.eval_every and not data.validation):
        heldout = open_examples(data, tokenizer, corpus, split="heldout", vocab_size=size)
    validation = open_validation_sets(data, size, workdir, tokenizer)
    verification += [one.stream.corpus.verify(*share) for one in validation.values()]
    return Text(tokenizer, train, heldout, validation, response_ends, tuple(verification))


def open_validation_sets(
    data: DataConfig, vocab_size: int | None, workdir: pathlib.Path, tokenizer: Tokenizer
) -> dict[str, Dataset]:
    """Opens the sets of `data.validation` by name, without the training text.

    Raises:
      ValueError: as `open_text`.
    """
    return {
        source.name: open_validation(
            data, source, tokenizer, workdir / "validation" / source.name, vocab_size=vocab_size
        )
        for source in data.validation
    }


def keep_tokenizer(origin: str, tokenizer: Tokenizer, workdir: pathlib.Path) -> None:
    """Writes the tokenizer of a new run to its folder, with the special tokens of its pretrained
    model, so that the folder can be moved, and converted to Hugging Face's format."""
    if tokenizer.file:
        save_tokenizer(tokenizer, workdir)
    if origin:
        copy_special_ids(run_folder.folder_of(origin), workdir)


def _kept(name: str, workdir: pathlib.Path) -> Tokenizer | None:
    """The tokenizer in a run's folder, if its name is a file's."""
    kept = run_folder.kept_tokenizer(name, workdir)
    return from_file(str(kept), name) if kept else None


def _fitting(tokenizer: Tokenizer, data: DataConfig, model: ModelSettings) -> Tokenizer:
    tokenizer = without_unread(tokenizer, model.vocab_size)
    tokenizer = begin_texts(tokenizer, data.text_begin)
    virtual = range(model.vocab_size, model.vocab_size + model.prompt_tokens)
    tokenizer = dataclasses.replace(tokenizer, prompt=tuple(virtual))
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"model.vocab_size = {model.vocab_size} is smaller than the "
            f"{tokenizer.vocab_size} tokens of data.tokenizer = {data.tokenizer!r}; set "
            f"model.vocab_size = {tokenizer.vocab_size}"
        )
    dropped = model.dropped_token
    if data.objective == "masked" and dropped not in (-1, tokenizer.mask):
        raise ValueError(
            f"model.dropped_token = {dropped} is not the mask of data.tokenizer = "
            f"{data.tokenizer!r}, which is {tokenizer.mask}; set model.dropped_token = "
            f"{-1 if tokenizer.mask is None else tokenizer.mask}"
        )
    return tokenizer
