"""`from_pretrained`: a trained model as a function of tokens, without a mesh or config."""

import dataclasses
import functools
import pathlib
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.hugging_face.model_folder import open_model
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.models.encoder_decoder import EncoderDecoder
from jaxscale.models.forward import forward
from jaxscale.models.positions import for_width
from jaxscale.models.protocol import head_params
from jaxscale.run.initial_weights import open_weights, read_weights
from jaxscale.training.kernels import evaluation_kernels
from jaxscale.training.tracing.abstract_model import find_model


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A model with its parameters, from `from_pretrained`."""

    config: ModelConfig
    params: Any = field(repr=False)  # in canonical form
    model: Decoder | EncoderDecoder = field(repr=False)

    def __call__(
        self,
        tokens: Any,
        decoder_tokens: Any = None,
        *,
        segments: Any = None,
        decoder_segments: Any = None,
        token_types: Any = None,
    ) -> jax.Array:
        """Float32 logits [batch, time, vocab_size] of the token after each position, or, without
        causal attention, of the token at it.

        Args:
          tokens: integers [batch, time]; for an encoder-decoder the encoder's.
          decoder_tokens: integers [batch, decoder time]; an encoder-decoder's logits are for these.
          segments, decoder_segments: the segment of each token, within which it attends; 0 is
            padding. None: one segment in each row.
          token_types: [batch, time], for a model that has them; None: type 0.

        A model with `prompt_tokens` reads its prompt before each row.

        Raises:
          ValueError: not [batch, time], a token beyond the vocabulary, or tokens for another type
            of model.
        """
        if (decoder_tokens is None) == bool(self.config.num_encoder_layers):
            needs = "tokens, decoder_tokens" if self.config.num_encoder_layers else "tokens"
            given = "without" if decoder_tokens is None else "with"
            raise ValueError(
                f"a {self.config.family} model is called {given} decoder_tokens; call it with "
                f"({needs})"
            )
        given = self._checked("tokens", tokens, segments)
        extras: dict[str, jax.Array] = {}
        if decoder_tokens is not None:
            names = ("encoder_tokens", "encoder_segments", "encoder_positions")
            extras |= dict(zip(names, given))
            given = self._checked("decoder_tokens", decoder_tokens, decoder_segments)
            if len(given[0]) != len(extras["encoder_tokens"]):
                raise ValueError(
                    f"decoder_tokens have {len(given[0])} rows, and tokens "
                    f"{len(extras['encoder_tokens'])}"
                )
        tokens, segments, positions = given
        if token_types is not None:
            extras["token_types"] = self._checked_types(token_types, tokens)
        if count := self.config.prompt_tokens:
            tokens, segments, positions = self._after_prompt(tokens, segments)
        weights = jnp.ones(tokens.shape)
        batch = Batch(tokens, tokens, segments, positions, weights, extras or ())
        # By default the matmuls of GPUs (TF32) and TPUs (bfloat16) round float32 operands.
        with jax.default_matmul_precision("float32"):
            model = for_width(self.model, tokens.shape[1])
            return _logits(model, self.params, batch)[:, count:]

    def _after_prompt(self, tokens: jax.Array, segments: jax.Array) -> tuple[jax.Array, ...]:
        """Tokens, segments and positions with the prompt's virtual tokens before each row.

        Raises:
          ValueError: a row has padding or several texts.
        """
        count, size = self.config.prompt_tokens, self.config.vocab_size
        if jnp.any(segments != 1):
            raise ValueError(
                f"segments with model.prompt_tokens = {count}, which puts a prompt before each "
                "row: pass one text in each row, without padding and segments"
            )
        virtual = jnp.broadcast_to(size + jnp.arange(count), (len(tokens), count))
        tokens = jnp.concatenate([virtual.astype(tokens.dtype), tokens], axis=1)
        segments = jnp.ones_like(tokens)
        return tokens, segments, _positions(segments)

    def _checked_types(self, token_types: Any, tokens: jax.Array) -> jax.Array:
        types = jnp.asarray(token_types, jnp.int32)
        known = self.config.token_types
        if types.shape != tokens.shape or not 0 <= types.min() <= types.max() < known:
            raise ValueError(
                f"token_types {types.shape} must be [batch, time] as tokens {tokens.shape}, and "
                f"below model.token_types = {known}"
            )
        return types

    def _checked(self, name: str, tokens: Any, segments: Any) -> tuple[jax.Array, ...]:
        """Tokens, their segments and positions."""
        given = np.asarray(tokens)
        if given.size and not np.issubdtype(given.dtype, np.integer):
            raise ValueError(f"{name} are {given.dtype}; pass integers")
        tokens = jnp.asarray(given, jnp.int32)
        segments = jnp.ones_like(tokens) if segments is None else jnp.asarray(segments, jnp.int32)
        if tokens.ndim != 2 or segments.shape != tokens.shape:
            raise ValueError(
                f"{name} {tokens.shape} and segments {segments.shape} must both be [batch, time]"
            )
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.config.vocab_size:
            raise ValueError(
                f"{name} are from {tokens.min()} to {tokens.max()}, and ids of the model are "
                f"from 0 to {self.config.vocab_size - 1}"
            )
        return tokens, segments, _positions(segments)


def from_pretrained(
    directory: str | pathlib.Path,
    *,
    compute_dtype: str = "float32",
    param_dtype: str | None = None,
    adapters: str | pathlib.Path | None = None,
) -> Pretrained:
    """Loads a model with its weights from a Hugging Face folder or a run, onto the default device.

    Args:
      directory: the folder; of a run, its newest checkpoint is read.
      compute_dtype: "float32", or "bfloat16" for less memory and more speed.
      param_dtype: None is the type of the folder: bfloat16 where all its tensors are, else float32.
      adapters: folder with PEFT adapters (LoRA or a prompt) for a Hugging Face model.

    Returns:
      A record with `config`, `params` and `model`; calling it with token ids [batch, time] returns
      float32 logits [batch, time, vocab_size].

    Raises:
      FileNotFoundError: the folder contains neither.
      ValueError: an unknown setting or tensor; names it.

    Examples:
      With the run of the example of `fit`:

      >>> pretrained = jaxscale.from_pretrained("runs/example")
      >>> pretrained(np.array([[72, 101, 108]])).shape
      (1, 3, 257)
    """
    if "float64" in (compute_dtype, param_dtype) and not jax.config.jax_enable_x64:
        raise ValueError(
            "compute_dtype or param_dtype = 'float64' needs jax.config.update('jax_enable_x64', "
            "True) first"
        )
    folder = pathlib.Path(directory)
    if adapters:
        weights = open_model(folder, adapters=pathlib.Path(adapters))
    else:
        weights = open_weights(folder)
    config = dataclasses.replace(
        weights.config,
        compute_dtype=compute_dtype,
        param_dtype=param_dtype or weights.dtype,
        attention="reference",
    )
    model: Any = find_model(config)(config, evaluation_kernels(plain_kernels()))
    params = read_weights(weights, model.axes, jax.eval_shape(model.init, jax.random.key(0)))
    return Pretrained(config, params, model.evaluated)


@functools.partial(jax.jit, static_argnums=0)
def _logits(model: Decoder | EncoderDecoder, params: Any, batch: Batch) -> jax.Array:
    stream = forward(model, params, batch)
    return model.logits(head_params(model, params), stream["x"]).astype(jnp.float32)


def _positions(segments: jax.Array) -> jax.Array:
    """Positions of tokens in their segments, from 0."""
    column = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return column - jax.lax.cummax(jnp.where(segments != before, column, 0), axis=1)
