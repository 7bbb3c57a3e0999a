"""Shapes of models that are known by name, where a table gives no more than that."""

from dataclasses import replace

from jaxscale.planner.shape import Mixer, Shape

NAMED = {
    "llama3-70b": Shape(
        80, 8192, 64, 8, 128, 28672, gated=True, vocab=128256, tied=False, seq_len=8192
    ),
    "gpt3-175b": Shape(
        96, 12288, 96, 96, 128, 49152, gated=False, vocab=51200, tied=True, seq_len=2048,
        biases=True, learned_positions=True,
    ),
    # NVIDIA Nemotron 3 (model cards of December 2025 and March 2026): state-space mixers,
    # experts of squared ReLU, and a few layers that attend.
    "nemotron-3-nano": Shape(
        52, 2688, 32, 2, 128, 0, gated=False, vocab=131072, tied=False, seq_len=8192,
        experts=128, top_k=6, expert_ff=1856, shared_experts=2, expert_gated=False,
        mixer=Mixer(layers=23, heads=64, head_dim=64, state=128, groups=8),
        attention_layers=6, mlp_layers=23,
    ),
    "nemotron-3-super": Shape(
        88, 4096, 32, 2, 128, 0, gated=False, vocab=131072, tied=False, seq_len=8192,
        experts=512, top_k=22, expert_ff=2688, expert_width=1024, shared_experts=1,
        shared_ff=5376, expert_gated=False,
        mixer=Mixer(layers=40, heads=128, head_dim=64, state=128, groups=8),
        attention_layers=8, mlp_layers=40, extra_predictions=2,
    ),
}  # fmt: skip


def named(model: str, seq_len: int) -> Shape | None:
    """The shape that a name stands for, in any case and with _ for -; None if it is not known."""
    name = model.lower().replace("_", "-").replace("nemotron3", "nemotron-3")
    found = [shape for known, shape in NAMED.items() if name.startswith(known)]
    return replace(found[0], seq_len=seq_len) if found else None
