"""A plain PyTorch trainer as a subject of `peers.py`, eager or by `torch.compile`.

The same decoder as our default family: RMSNorm, RoPE, causal attention by PyTorch's fused kernel,
SwiGLU; AdamW with float32 state and clipped gradients. In bfloat16 by autocast. It runs in
PyTorch's environment, so it imports nothing of this project. Its protocol is that of `measure.py`:
a report after the first step, after a step for each line read, and at the end.
"""

# pyright: reportMissingImports=false
# (PyTorch is in another environment)
import argparse
import json
import os
import resource
import sys
import time
from typing import Any

SAY = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # the compiler's output goes to stderr

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

IMPORTED = time.monotonic()


class Block(nn.Module):
    """Attention and SwiGLU."""

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        width, head_dim = sizes["d_model"], sizes["head_dim"]
        self.heads = [sizes["num_heads"], sizes["num_kv_heads"], sizes["num_kv_heads"]]
        self.head_dim = head_dim
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, sum(self.heads) * head_dim, bias=False)
        self.out = nn.Linear(self.heads[0] * head_dim, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, sizes["d_ff"], bias=False)
        self.up = nn.Linear(width, sizes["d_ff"], bias=False)
        self.down = nn.Linear(sizes["d_ff"], width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The stream after the block, [B, T, D]."""
        batch, length = x.shape[:2]
        heads = self.qkv(self.attention_norm(x)).view(batch, length, -1, self.head_dim)
        q, k, v = (each.transpose(1, 2) for each in heads.split(self.heads, dim=2))
        q, k = (rotary(each, cos, sin) for each in (q, k))
        several = self.heads[0] != self.heads[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=several)
        x = x + self.out(out.transpose(1, 2).reshape(batch, length, -1))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of [B, N, T, H]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Model(nn.Module):
    """The decoder and its mean loss in nats per token."""

    def __init__(self, sizes: dict[str, Any]):
        super().__init__()
        width, half = sizes["d_model"], sizes["head_dim"] // 2
        self.embed = nn.Embedding(sizes["vocab_size"], width)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes["num_layers"]))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, sizes["vocab_size"], bias=False)
        rate = sizes["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(sizes["seq_len"])[:, None] * rate
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of [B, T + 1] tokens."""
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    """Trains until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--started", type=float, required=True, help="the parent's monotonic time")
    parser.add_argument("--sizes", type=json.loads, required=True)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    sizes = options.sizes
    torch.manual_seed(0)
    model = Model(sizes)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=sizes["learning_rate"],
        betas=(sizes["b1"], sizes["b2"]),
        weight_decay=sizes["weight_decay"],
    )
    tokens = torch.randint(sizes["vocab_size"], (sizes["batch"], sizes["seq_len"] + 1))
    run = torch.compile(model) if options.compile else model
    narrow = sizes["compute_dtype"] == "bfloat16"

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss = run(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), sizes["clip_norm"])
        optimizer.step()
        return float(loss)

    built = time.monotonic()
    loss = step()
    phases = {
        "imports": IMPORTED - options.started,
        "build": built - IMPORTED,
        "compile": time.monotonic() - built,  # with the first step
    }
    num_params = sum(parameter.numel() for parameter in model.parameters())
    say(
        phases=phases,
        cpu_seconds=time.process_time(),
        loss=loss,
        note=f"{num_params} parameters",
        num_params=num_params,
        platform="cpu",
        device_kind="cpu",
        num_devices=1,
        versions={"torch": torch.__version__},
    )
    while sys.stdin.readline() == "step\n":
        begin, cpu_begin = time.perf_counter(), time.process_time()
        loss = step()
        say(
            seconds=time.perf_counter() - begin,
            cpu_seconds=time.process_time() - cpu_begin,
            loss=loss,
        )
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    say(peak_resident_bytes=peak, peak_device_bytes=None)


def say(**fields: Any) -> None:
    """Writes a report."""
    print(json.dumps(fields), file=SAY, flush=True)


if __name__ == "__main__":
    main()
