"""Prompts: token ids, conversations, and the rows of an encoder."""

from collections.abc import Sequence

import numpy as np

from jaxscale.data.text.chat_template import Messages, Tools
from jaxscale.data.tokens.tokenizer import SENTINEL, Tokenizer
from jaxscale.decoding.cache import Source, round_up
from jaxscale.models.encoder_decoder import EncoderDecoder
from jaxscale.training.engine import Engine


def has_encoder(engine: Engine) -> bool:
    """Whether the model encodes a prompt with an encoder."""
    return isinstance(engine.model, EncoderDecoder)


def check_decodes(engine: Engine) -> None:
    """Refuses a model that does not decode token by token.

    Raises:
      ValueError: with the reason.
    """
    model = engine.config.model
    if not model.causal:
        raise ValueError(
            f"model.family = {model.family!r} is not causal here: it predicts masked tokens, and "
            "cannot generate or score text; call jaxscale.from_pretrained(DIR)"
        )
    if engine.model.tables:
        raise ValueError(
            f"a model with tables, {', '.join(engine.model.tables)}, cannot generate or score "
            "text: their rows are looked up for whole batches; evaluate its loss instead"
        )
    if not engine.model.can_decode:
        why = (
            f"with model.router = {model.router!r} experts choose among all tokens of a text, "
            "including later ones"
            if model.experts_choose
            else "its blocks have no decode()"
        )
        raise ValueError(f"model.family = {model.family!r} cannot generate or score text: {why}")


def encode_prompts(
    engine: Engine, tokenizer: Tokenizer, prompts: Sequence[str | np.ndarray]
) -> tuple[Source | None, list[np.ndarray]]:
    """The rows of an encoder, if any, and the ids with which each text begins.

    Raises:
      ValueError: ids of a prompt that are not the model's.
    """
    ids = [prompt_ids(engine, tokenizer, prompt) for prompt in prompts]
    model = engine.config.model
    _check_ids(ids, model.vocab_size, model.prompt_tokens)
    if has_encoder(engine):
        return source_rows(ids), [np.array([tokenizer.decoder_start])] * len(ids)
    return None, ids


def encode_messages(tokenizer: Tokenizer, messages: Messages, tools: Tools = None) -> np.ndarray:
    """The ids of a conversation by the tokenizer's chat template, up to the assistant's answer.

    Raises:
      ValueError: there is no template, or it refuses the conversation.
    """
    if tokenizer.template is None or tokenizer.encode_chat is None:
        raise ValueError(
            f"--messages: data.tokenizer = {tokenizer.name!r} has no chat template; add a "
            "chat_template.jinja or tokenizer_config.json to the folder of the tokenizer.json"
        )
    try:
        text = tokenizer.template.render(messages, tools, add_generation_prompt=True)
    except ValueError as error:
        raise ValueError(f"--messages: the conversation {error}") from error
    return np.append(np.array(tokenizer.prompt, np.int32), tokenizer.encode_chat(text).ids)


def prompt_ids(engine: Engine, tokenizer: Tokenizer, prompt: str | np.ndarray) -> np.ndarray:
    """The ids of a prompt as in training: after the model's virtual tokens, if any, and the ids
    that begin a text, or, for an encoder,
    before the id that ends a document. For an encoder, names of sentinels are their ids."""
    if not isinstance(prompt, str):
        return np.asarray(prompt, np.int32)
    (ids,) = tokenizer.encode([prompt])
    if not has_encoder(engine):
        begin = (*tokenizer.prompt, *tokenizer.begin(len(ids)))
        return np.concatenate([np.array(begin, np.int32), ids])
    names = map(SENTINEL.format, range(len(tokenizer.sentinels)))
    if tokenizer.encode_chat and any(name in prompt for name in names):
        ids = tokenizer.encode_chat(prompt).ids
    return np.append(ids, np.int32(tokenizer.boundary))


def source_rows(prompts: Sequence[np.ndarray], num_rows: int = 0) -> Source:
    """The rows of an encoder, from the ids of each prompt; further rows, up to `num_rows`, are
    padding."""
    width = round_up(max(map(len, prompts)))
    tokens = np.zeros((max(num_rows, len(prompts)), width), np.int32)
    segments = np.zeros_like(tokens)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
    return tokens, segments


def _check_ids(prompts: Sequence[np.ndarray], vocab_size: int, virtual: int) -> None:
    """Refuses ids out of range, which a lookup on a device would clip silently."""
    for i, ids in enumerate(prompts):
        if ids.ndim != 1 or not ids.size:
            raise ValueError(f"prompts[{i}] has shape {ids.shape}; ids are of shape [at least 1]")
        if not 0 <= ids.min() <= ids.max() < vocab_size + virtual:
            more = f" + model.prompt_tokens = {virtual}" * (virtual > 0)
            raise ValueError(
                f"prompts[{i}] has ids from {ids.min()} to {ids.max()}; they must be at least 0 "
                f"and below model.vocab_size = {vocab_size}{more}"
            )
