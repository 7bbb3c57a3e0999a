"""Mixture-of-experts options of `ModelConfig`: experts, router, balancing."""

import dataclasses
import math
from dataclasses import dataclass

from jaxscale.choices import check_at_least, check_choice, nearest_divisors
from jaxscale.config.model.settings import EXPERTS_CHOOSE, option

ROUTERS = ("top_k", "prototypes", "expert_choice", "balanced")
SCORES = ("softmax", "sigmoid", "softmax_of_chosen")
BALANCES = ("sequence", "microbatch")
CHOICES = {"router": ROUTERS, "router_scores": SCORES, "balance": BALANCES}


@dataclass(frozen=True)
class ExpertOptions:
    """The options of mixtures of experts. `num_experts` is 0 for a dense model, and the others then
    have no effect."""

    num_experts: int = option(0)  # per layer
    experts_per_token: int = option(2)
    expert_d_ff: int = option(0)  # hidden features of an expert; 0 is d_ff
    shared_d_ff: int = option(0)  # hidden features of a shared expert for every token; 0: none
    dense_layers: int = option(0)  # number of first layers without experts
    expert_pattern: str = option("")  # repeats after dense_layers: D dense, E experts; "": all E
    # "top_k" gives a token its best experts; "prototypes" the best expert of each of
    # experts_per_token sets (arXiv 2105.15082); with "expert_choice" each expert takes its best
    # tokens, by capacity_factor (arXiv 2202.09368); with "balanced" after scores are balanced over
    # the tokens, too (CPM-2, arXiv 2106.10715).
    router: str = option("top_k")
    router_scores: str = option("softmax")  # "softmax_of_chosen": softmax after the choice
    router_normalized: bool = option(False)  # a token's weights are divided by their sum
    router_scale: float = option(1.0)  # factor of a token's weights
    router_groups: int = option(1)  # of experts; a token chooses in its best router_groups_kept
    router_groups_kept: int = option(1)
    router_logit_bias: bool = option(False)  # learned bias of the router's logits
    router_bias: bool = option(False)  # bias of scores for the choice, updated by balance_rate
    # The router's input is multiplied by random factors in [1 - x, 1 + x] (arXiv 2101.03961).
    router_jitter: float = option(0.0)
    # Capacity of an expert, relative to an even share of a sequence's choices. Later tokens of the
    # text are dropped; 0 drops none.
    capacity_factor: float = option(0.0)
    # Tokens over which the auxiliary loss balances: of each sequence, or of a whole micro-batch on
    # all ranks, which depends on layout.microbatches.
    balance: str = option("sequence")
    balance_weight: float = option(0.01)  # of the auxiliary loss; 0 means none
    balance_rate: float = option(0.0)  # change of router_bias per step (arXiv 2408.15664)
    router_z_loss: float = option(0.0)  # weight of the squared logarithm of the softmax's sum

    def check_experts(self, num_layers: int, period: int) -> None:
        """Refuses options that contradict each other.

        Raises:
          ValueError: with the setting to change.
        """
        for name, choices in CHOICES.items():
            check_choice(f"model.{name}", getattr(self, name), choices)
        zero = ("expert_d_ff", "shared_d_ff", "dense_layers", "capacity_factor", "router_scale")
        zero += ("balance_weight", "balance_rate", "router_z_loss", "router_jitter")
        one = ("experts_per_token", "router_groups", "router_groups_kept")
        check_at_least("model", self, num_experts=0, **dict.fromkeys(zero, 0))
        check_at_least("model", self, **dict.fromkeys(one, 1))
        if not self.num_experts:
            return
        if self.router_jitter > 1:
            raise ValueError(f"model.router_jitter = {self.router_jitter} must be at most 1")
        experts = self.num_experts
        if self.experts_per_token > experts:
            raise ValueError(
                f"model.experts_per_token = {self.experts_per_token} is more than "
                f"model.num_experts = {experts}; set model.experts_per_token = {experts} or fewer"
            )
        if self.dense_layers >= num_layers:
            raise ValueError(
                f"model.dense_layers = {self.dense_layers} leaves no layer with experts of "
                f"model.num_layers = {num_layers}; set model.dense_layers = {num_layers - 1} or "
                "fewer, or model.num_experts = 0"
            )
        if self.dense_layers % period:
            raise ValueError(
                f"model.dense_layers = {self.dense_layers} is not a multiple of the {period} "
                f"layers of model.layer_pattern; set model.dense_layers = "
                f"{self.dense_layers // period * period}"
            )
        self._check_pattern(num_layers, period)
        self._check_router(experts)
        if self.balance_rate and not self.router_bias:
            raise ValueError(
                f"model.balance_rate = {self.balance_rate} updates a bias that the router does not "
                "have; set model.router_bias = True, or model.balance_rate = 0"
            )

    def _check_pattern(self, num_layers: int, period: int) -> None:
        pattern, dense = self.expert_pattern, self.dense_layers
        if set(pattern) - set("DE") or (pattern and "E" not in pattern):
            raise ValueError(
                f"model.expert_pattern = {pattern!r} is of letters D (dense) and E (with experts), "
                "at least one of them E, such as 'DE'"
            )
        if rest := pattern and (num_layers - dense) % len(pattern):
            below, above = num_layers - rest, num_layers - rest + len(pattern)
            nearest = f"{below} or {above}" if below > dense else f"{above}"
            raise ValueError(
                f"model.expert_pattern = {pattern!r} does not divide the {num_layers - dense} "
                f"layers after model.dense_layers = {dense}; set model.num_layers = {nearest}"
            )
        if pattern and period > 1:
            raise ValueError(
                f"model.expert_pattern = {pattern!r} with model.layer_pattern is not available; "
                "set one of them to ''"
            )

    def _check_router(self, experts: int) -> None:
        if self.router == "prototypes":
            if experts % self.experts_per_token:
                raise ValueError(
                    f"model.num_experts = {experts} cannot be split evenly into "
                    f"model.experts_per_token = {self.experts_per_token} prototypes; set "
                    f"model.num_experts = {experts - experts % self.experts_per_token}"
                )
            if self.router_groups > 1 or self.router_scores != "softmax":
                raise ValueError(
                    "model.router = 'prototypes' has a softmax in each prototype and no groups; "
                    "set model.router_scores = 'softmax' and model.router_groups = 1, or "
                    "model.router = 'top_k'"
                )
        if self.router in EXPERTS_CHOOSE:
            self._check_expert_choice()
        if experts % self.router_groups:
            raise ValueError(
                f"model.num_experts = {experts} is not a multiple of model.router_groups = "
                f"{self.router_groups}; set model.router_groups = "
                f"{nearest_divisors(experts, self.router_groups)}"
            )
        each = experts // self.router_groups
        if self.router_groups > 1 and each < 2:
            raise ValueError(
                f"model.router_groups = {self.router_groups} of model.num_experts = {experts} have "
                "one expert each, and groups are chosen by their two best; set "
                f"model.router_groups = {experts // 2 if experts % 2 == 0 else 1}, or 1 for none"
            )
        kept = self.router_groups_kept * each
        if self.router_groups_kept > self.router_groups or kept < self.experts_per_token:
            raise ValueError(
                f"model.router_groups_kept = {self.router_groups_kept} of model.router_groups = "
                f"{self.router_groups} leave {kept} of {experts} experts for "
                f"model.experts_per_token = {self.experts_per_token}; set "
                f"model.router_groups_kept from {math.ceil(self.experts_per_token / each)} to "
                f"{self.router_groups}"
            )

    def _check_expert_choice(self) -> None:
        if not self.capacity_factor:
            raise ValueError(
                f"model.capacity_factor = 0 with model.router = {self.router!r}, which needs the "
                "number of tokens of each expert; set model.capacity_factor, such as 1.0"
            )
        for name, plain in (("balance_weight", 0), ("router_bias", False), ("router_groups", 1)):
            value = getattr(self, name)
            if value != plain:
                raise ValueError(
                    f"model.{name} = {value} with model.router = {self.router!r}, whose experts "
                    f"have equally many tokens; set model.{name} = {plain}"
                )
        if self.router_scores == "softmax_of_chosen":
            raise ValueError(
                f"model.router_scores = 'softmax_of_chosen' with model.router = {self.router!r}, "
                "whose tokens may have no expert; set model.router_scores = 'softmax'"
            )

    def has_experts(self, layer: int) -> bool:
        """Whether the layer with this index has experts."""
        pattern = self.expert_pattern or "E"
        position = layer - self.dense_layers
        return self.num_experts > 0 and position >= 0 and pattern[position % len(pattern)] == "E"

    @property
    def has_balance_loss(self) -> bool:
        """Whether layers with experts add an auxiliary loss."""
        return bool(self.num_experts and (self.balance_weight or self.router_z_loss))


EXPERTS = tuple(one.name for one in dataclasses.fields(ExpertOptions) if one.name != "num_experts")
"""The settings that are read if `num_experts` is not 0."""
