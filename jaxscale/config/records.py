"""Records of a run's settings: data, run, and the whole config.

Nothing here imports JAX: a mistyped key must be refused in a fraction of a second.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from jaxscale.choices import check_at_least, check_choice, check_kind
from jaxscale.config.batch_schedule import (
    BatchSchedule,
    batch_size_at,
    examples_before,
    to_batch_schedule,
)
from jaxscale.config.data_source import Source, to_sources, to_validation
from jaxscale.config.layout import Layout
from jaxscale.config.model import ModelConfig, ModelSettings
from jaxscale.config.model.rope_scaling import BY_LENGTH
from jaxscale.config.optimizer import OptimizerConfig
from jaxscale.config.width_scaling import check_width_scaling
from jaxscale.formatting import changed_fields
from jaxscale.model_families.shipped import find_family

OBJECTIVES = (
    "causal",
    "causal_across_documents",
    "prefix",
    "span_corruption",
    "ul2",
    "masked",
)
PAIRED_OBJECTIVES = ("prefix", "span_corruption", "ul2")
"""The objectives that also train encoder-decoders."""

TEXT_BEGINS = ("tokenizer", "boundary")
"""The start of a prompt: the prefix of the tokenizer's post-processor, which may be empty, or the
token that begins a document."""

WITHOUT_FILE = ("bytes", "esm2")
"""Tokenizers without a file and a post-processor, whose prompts begin as documents do."""

MOST_STEPS = 2**31 - 1
"""The most steps: their count in the state is an int32."""

CONFIG_ADVICE = "pass the result of jaxscale.load(FILE)"


def check_seed(name: str, seed: int) -> None:
    """Refuses a seed that the random generators of JAX and Grain cannot take."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"{name} = {seed} must be at least 0 and below 2**32")


@dataclass(frozen=True)
class DataConfig:
    """Data settings: sources, tokenizer, and the shape of batches.

    `source` lists entries, each a path (file, folder, glob, prepared folder) or a mapping with a
    `path` and the other keys of `Source`; `{stdlib}` stands for the source of Python's standard
    library. `tokenizer` is "bytes", a path to a Hugging Face tokenizer.json, or "bpe:4096", which
    trains a byte-pair tokenizer of that many tokens on the source before the first step.
    `objective` selects what is predicted, and from which tokens: see `data/objectives.py`.
    """

    source: tuple[Source, ...] = (Source(("{stdlib}/**/*.py",)),)
    tokenizer: str = "bytes"
    text_begin: str = "tokenizer"  # start of prompts; see TEXT_BEGINS
    global_batch_size: int = 8  # sequences per step
    batch_schedule: BatchSchedule = ()  # smaller batches before: {0: 2, 100: 8}
    seq_len: int = 128  # tokens of a sequence; for encoder-decoders, of the encoder
    target_len: int = 0  # tokens of an encoder-decoder's decoder; 0 for other models
    heldout: float = 0.05  # share of the documents, for evaluation only
    seed: int = 0
    objective: str = "causal"
    workers: int = 0  # processes that prefetch batches; 0 prefetches in a thread
    validation: tuple[Source, ...] = ()  # sets with a name, evaluated as a whole

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        check_choice("data.objective", self.objective, OBJECTIVES)
        check_choice("data.text_begin", self.text_begin, TEXT_BEGINS)
        check_at_least("data", self, global_batch_size=1, seq_len=2, target_len=0, workers=0)
        schedule = to_batch_schedule(self.batch_schedule, self.global_batch_size)
        object.__setattr__(self, "batch_schedule", schedule)
        if self.target_len and self.objective not in PAIRED_OBJECTIVES:
            raise ValueError(
                f"data.target_len = {self.target_len} is for an encoder-decoder, which "
                f"data.objective = {self.objective!r} does not train; set data.objective to "
                f"{' or '.join(PAIRED_OBJECTIVES)}, or data.target_len = 0"
            )
        check_seed("data.seed", self.seed)
        for name, read in (("source", to_sources), ("validation", to_validation)):
            entries = read(getattr(self, name))
            if self.target_len:
                entries = tuple(
                    self._for_encoder(f"data.{name}[{i}]", entry) for i, entry in enumerate(entries)
                )
            object.__setattr__(self, name, entries)
        for i, source in enumerate(self.source):
            if source.name:
                raise ValueError(
                    f"data.source[{i}]['name'] = {source.name!r} is for entries of "
                    "data.validation; leave it out"
                )
        if not 0 <= self.heldout < 1:
            raise ValueError(f"data.heldout = {self.heldout} must be at least 0 and below 1")

    def _for_encoder(self, name: str, source: Source) -> Source:
        """The entry with prompt and response tokenised separately, for an encoder-decoder.

        Raises:
          ValueError: an encoder-decoder cannot train on it.
        """
        if source.messages:
            raise ValueError(
                f"{name}: messages = {source.messages!r} are conversations, and "
                f"data.target_len = {self.target_len} is for an encoder-decoder, which trains on "
                "texts, or on prompts with responses; give the fields prompt and response"
            )
        if source.response and self.objective != "prefix":
            raise ValueError(
                f"data.objective = {self.objective!r} defines the decoder's text, and so does "
                f"{name}: response = {source.response!r}; set data.objective = 'prefix'"
            )
        return dataclasses.replace(source, apart=bool(source.response))

    @property
    def unread(self) -> set[str]:
        """The settings that nothing reads."""
        unread = {"batch_schedule"} | ({"text_begin"} if self.tokenizer in WITHOUT_FILE else set())
        return unread | (set() if self.objective in PAIRED_OBJECTIVES else {"target_len"})

    @property
    def tokens_per_step(self) -> int:
        """Positions of a global batch, padding included; of the largest with `batch_schedule`."""
        return self.global_batch_size * (self.seq_len + self.target_len)

    def sequences_after(self, steps: int) -> int:
        """Sequences of the step after `steps` steps."""
        return batch_size_at(self.batch_schedule, self.global_batch_size, steps)

    def examples_of(self, steps: int) -> int:
        """Examples that the first `steps` steps read."""
        return examples_before(self.batch_schedule, self.global_batch_size, steps)

    @property
    def output_len(self) -> int:
        """Tokens of the sequence with targets: the decoder's."""
        return self.target_len or self.seq_len

    @property
    def one_document(self) -> bool:
        """Whether every row of a batch is one document followed by padding."""
        return self.objective == "causal_across_documents"


def _is_multiple(steps: int, period: int) -> bool:
    """Whether `steps` is a multiple of `period`, with both above 0."""
    return steps > 0 < period and steps % period == 0


@dataclass(frozen=True)
class RunConfig:
    """Run settings: length, evaluation, checkpoints, bad steps. A period of 0 means never; the last
    step is always evaluated and saved."""

    steps: int = 100
    epochs: float = 0.0  # passes over the text, in place of steps; 0: by steps
    seed: int = 0
    eval_every: int = 0
    eval_batches: int = 8  # of the held-out text; validation sets are read as a whole
    checkpoint_every: int = 0  # 0 saves the last step only
    keep_last: int = 3
    keep_every: int = 0  # also keep each checkpoint whose step is a multiple of this
    keep_best: bool = False  # also keep the checkpoint with the lowest held-out loss
    metrics_by_layer: bool = False  # log means over layers, such as experts' loads, also by layer
    deterministic: bool = False  # bitwise reproducible, also on GPUs, at some cost of speed
    # A step with a non-finite loss or gradient norm updates nothing; after this many in a row the
    # run returns to its newest checkpoint and skips their examples. 0 stops at the first.
    skip_bad_steps: int = 0
    # Bad steps also include those with a loss or gradient norm this many robust standard deviations
    # above the median of previous steps; 0: never.
    spike_score: float = 0.0
    noise_every: int = 0  # steps between measurements of the gradient noise scale; 0: never
    max_hours: float = 0.0  # stop with a checkpoint after this long; 0: never
    hang_seconds: float = 0.0  # exit after this long without progress; 0: learned from the run

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        zero = ("epochs", "eval_every", "checkpoint_every", "keep_every", "skip_bad_steps")
        zero += ("noise_every", "max_hours", "hang_seconds")
        check_at_least("run", self, steps=1, eval_batches=1, keep_last=1, **dict.fromkeys(zero, 0))
        check_seed("run.seed", self.seed)
        if self.steps > MOST_STEPS:
            raise ValueError(f"run.steps = {self.steps} is too large; at most {MOST_STEPS}")
        if not 0 <= self.spike_score < math.inf:
            raise ValueError(f"run.spike_score = {self.spike_score} must be at least 0, such as 8")
        if self.spike_score and not self.skip_bad_steps:
            raise ValueError(
                f"run.spike_score = {self.spike_score} with run.skip_bad_steps = 0, which skips no "
                "step; set run.skip_bad_steps, such as 5, or run.spike_score = 0"
            )
        if self.keep_every and not _is_multiple(self.keep_every, self.checkpoint_every):
            period = self.checkpoint_every
            change = (
                f"run.keep_every = {-(-self.keep_every // period) * period}"
                if period
                else f"run.checkpoint_every = {self.keep_every}"
            )
            raise ValueError(
                f"run.keep_every = {self.keep_every} is not a multiple of run.checkpoint_every = "
                f"{period}; set {change}"
            )
        if self.keep_best and not _is_multiple(self.checkpoint_every, self.eval_every):
            raise ValueError(
                f"run.keep_best needs an evaluation for each checkpoint, and run.eval_every = "
                f"{self.eval_every} does not divide run.checkpoint_every = "
                f"{self.checkpoint_every}; set run.eval_every = {self.checkpoint_every or 100}"
                + ("" if self.checkpoint_every else " and run.checkpoint_every, too")
            )

    @property
    def unread(self) -> set[str]:
        """The settings that nothing reads, or that are off by default."""
        unread = {"epochs", "keep_best", "noise_every"} | (
            set() if self.checkpoint_every else {"keep_every"}
        )
        return unread | (set() if self.skip_bad_steps else {"spike_score"})


@dataclass(frozen=True)
class Config:
    """The configuration of a run: five frozen records, checked together.

    Attributes:
      model: a `ModelConfig`, or the record of a custom model, which extends `ModelSettings`.
      data: sources, tokenizer, batch and sequence length.
      optimizer: update rule, learning rate, clipping.
      layout: a `Layout`.
      run: steps, evaluations, checkpoints.

    Raises:
      ValueError: settings that contradict each other; names the one to change.

    Examples:
      >>> config = jaxscale.load("tiny", ["layout.fsdp=2"])
      >>> config.layout.fsdp, config.data.seq_len
      (2, 64)
    """

    model: Any = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    layout: Layout = field(default_factory=Layout)
    run: RunConfig = field(default_factory=RunConfig)

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        given = self.optimizer.schedule_steps is not None
        known = given or not self.run.epochs  # epochs become steps when the text is counted
        if known and self.optimizer.warmup_steps > self.schedule_steps:
            name = "optimizer.schedule_steps" if given else "run.steps"
            raise ValueError(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps} is more than "
                f"{name} = {self.schedule_steps}; lower optimizer.warmup_steps, or raise {name}"
            )
        rule = self.optimizer
        end = rule.sparsity_begin + (rule.sparsity_steps or 0)
        if known and rule.prunes and end > self.schedule_steps:
            name = "optimizer.schedule_steps" if given else "run.steps"
            raise ValueError(
                f"optimizer.sparsity_begin + sparsity_steps = {end} is more than {name} = "
                f"{self.schedule_steps}; lower them, or raise {name}"
            )
        self._check_batch_schedule()
        advice = "its record extends jaxscale.ModelSettings or jaxscale.ModelConfig"
        check_kind("config.model", self.model, ModelSettings, advice)
        self._check_positions()
        check_width_scaling(self.optimizer, self.model)
        if isinstance(self.model, ModelConfig):
            self._take_length(self.model)
            self._check_family(self.model)
            self._check_prompt(self.model.prompt_tokens)
        if self.optimizer.keep_state and not self.model.init_from:
            raise ValueError(
                "optimizer.keep_state = True loads the optimizer's state of the run in "
                "model.init_from, which is empty; set it to a run, or set "
                "optimizer.keep_state = False"
            )

    def _check_batch_schedule(self) -> None:
        if not self.data.batch_schedule:
            return
        for name, value, instead in (
            ("run.epochs", self.run.epochs, "run.steps instead"),
            ("model.unshare_at", getattr(self.model, "unshare_at", 0), "model.unshare_at = 0"),
            (
                "optimizer.table_staleness",
                self.optimizer.table_staleness,
                "optimizer.table_staleness = 0",
            ),
        ):
            if value:
                raise ValueError(
                    f"{name} = {value} with data.batch_schedule is not available in this version; "
                    f"set {instead}, or data.batch_schedule = {{}}"
                )

    def _check_positions(self) -> None:
        most, name = self.model.max_positions, f"model.{self.model.position_setting}"
        if most is not None and self.data.seq_len > most:
            raise ValueError(
                f"data.seq_len = {self.data.seq_len} is more than {name} = {most}, the number of "
                f"learned positions; lower data.seq_len or raise {name}"
            )

    def _check_prompt(self, count: int) -> None:
        if count and self.data.objective not in ("causal", "prefix"):
            raise ValueError(
                f"model.prompt_tokens = {count} puts a prompt before each document, and "
                f"data.objective = {self.data.objective!r} has other rows; set data.objective to "
                "causal or prefix"
            )

    def _take_length(self, model: ModelConfig) -> None:
        if model.rope_scaling not in BY_LENGTH:
            return
        if not model.rope_length:
            model = dataclasses.replace(model, rope_length=self.data.seq_len)
            object.__setattr__(self, "model", model)
        if model.rope_length < self.data.seq_len:
            raise ValueError(
                f"model.rope_length = {model.rope_length} is less than data.seq_len = "
                f"{self.data.seq_len}; set model.rope_length = 0, which stands for it"
            )

    def _check_family(self, model: ModelConfig) -> None:
        layout = self.layout
        repeats = layout.pipeline != 1 and layout.remat_policy.kept_passes is not None
        if model.side_width and repeats:
            raise ValueError(
                f"layout.remat = {layout.remat!r} repeats whole forward passes of a pipeline, and "
                f"next to model.side_width = {model.side_width} the layers save nothing that this "
                "would free; set layout.remat = 'none'"
            )
        expert = self.layout.expert
        if expert != 1 and not model.num_experts:
            raise ValueError(
                f"layout.expert = {expert}, but this model has no experts (model.family = "
                f"{model.family!r}); set layout.expert = 1"
            )
        if not model.gated and "mlp_gate" in self.layout.remat:
            raise ValueError(
                f"layout.remat = {self.layout.remat!r} names mlp_gate, and the MLP of "
                f"model.family = {model.family!r} has no gate; leave mlp_gate out"
            )
        if (self.data.objective == "masked") == model.causal:
            needs, is_now, others = (
                (
                    "bidirectional",
                    "causal",
                    "causal, causal_across_documents, prefix, span_corruption or ul2",
                )
                if model.causal
                else ("causal", "not causal", "masked")
            )
            setting = "causal" in find_family(model.family).settings
            raise ValueError(
                f"data.objective = {self.data.objective!r} needs {needs} attention, and this model "
                f"(model.family = {model.family!r}) is {is_now}; set data.objective to {others}"
                + (f", or set model.causal = {not model.causal}" if setting else "")
            )
        if self.data.target_len and not model.num_encoder_layers:
            raise ValueError(
                f"data.target_len = {self.data.target_len} is for an encoder-decoder, and "
                f"model.family = {model.family!r} has no encoder; set data.target_len = 0"
            )
        if model.num_encoder_layers and not self.data.target_len:
            raise ValueError(
                f"data.target_len = 0, and model.family = {model.family!r} has an encoder; set "
                "data.target_len to the tokens of its decoder, such as "
                f"{max(1, self.data.seq_len // 4)}"
            )

    @property
    def schedule_steps(self) -> int:
        """Length of the learning-rate schedule, in steps."""
        return self.optimizer.schedule_steps or self.run.steps


SECTIONS = tuple(section.name for section in dataclasses.fields(Config))
