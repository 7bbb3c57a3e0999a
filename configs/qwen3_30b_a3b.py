"""Qwen3 30B-A3B (arXiv 2505.09388), from scratch.

Command: python -m jaxscale.train --config configs/qwen3_30b_a3b.py --workdir runs/qwen3_30b_a3b
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: 64 accelerators of 80 GB, in nodes of 8 whose accelerators share the experts.
Parameters: 30,532,122,624; 3,353,032,704 active per token.
Expected: not measured yet.
"""

import ml_collections


def get_config():
    """The shape is published; the run is a choice of ours: 4M tokens a step, 420B tokens in all."""
    model = ml_collections.ConfigDict()
    model.family = "qwen3_moe"
    model.num_layers = 48
    model.d_model = 2048
    model.num_heads = 32
    model.num_kv_heads = 4
    model.head_dim = 128
    model.d_ff = 6144
    model.vocab_size = 151_936
    model.num_experts = 128
    model.experts_per_token = 8
    model.expert_d_ff = 768

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
