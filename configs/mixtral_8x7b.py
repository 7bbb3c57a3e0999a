"""Mixtral 8x7B (arXiv 2401.04088), from scratch.

Command: python -m jaxscale.train --config configs/mixtral_8x7b.py --workdir runs/mixtral_8x7b
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: 64 accelerators of 80 GB, in nodes of 8 whose accelerators share the experts.
Parameters: 46,702,792,704; 12,879,925,248 active per token.
Expected: not measured yet.
"""

import ml_collections


def get_config():
    """The shape is published; the run is a choice of ours: 4M tokens a step, 420B tokens in all."""
    model = ml_collections.ConfigDict()
    model.family = "mixtral"
    model.num_layers = 32
    model.d_model = 4096
    model.num_heads = 32
    model.num_kv_heads = 8
    model.head_dim = 128
    model.d_ff = 14_336
    model.vocab_size = 32_000
    model.num_experts = 8
    model.experts_per_token = 2

    data = ml_collections.ConfigDict()
    data.global_batch_size = 1024
    data.seq_len = 4096

    optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = 3e-4
    optimizer.warmup_steps = 2_000

    layout = ml_collections.ConfigDict()
    layout.data = 1
    layout.fsdp = -1
    layout.expert = 8
    layout.zero_stage = 3
    layout.microbatches = 16
    layout.remat = "full"

    run = ml_collections.ConfigDict()
    run.steps = 100_000
    run.eval_every = 1_000
    run.checkpoint_every = 1_000

    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
