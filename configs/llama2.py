"""Llama 2 of 7B, 13B and 70B (arXiv 2307.09288), from scratch.

Command: python -m jaxscale.train --config llama2_7b --workdir runs/llama2_7b
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: accelerators of 80 GB or more: 64 for 7b (4 sequences per micro-batch each), 128 for 13b
  (2 each), 512 for 70b (1 each).
Parameters: 6,738,415,616; 13,015,864,320; 68,976,648,192.
Expected: not measured yet.
"""

import ml_collections

SIZES = {  # layers, d_model, heads, key heads, d_ff, learning rate, micro-batches
    "7b": (32, 4_096, 32, 32, 11_008, 3e-4, 4),
    "13b": (40, 5_120, 40, 40, 13_824, 3e-4, 4),
    "70b": (80, 8_192, 64, 8, 28_672, 1.5e-4, 2),
}


def get_config(size: str = "7b"):
    """Batch, schedule and learning rate as published: 4M tokens a step, 2T tokens in all."""
    layers, d_model, heads, kv_heads, d_ff, rate, microbatches = SIZES[size]
    model = ml_collections.ConfigDict()
    model.num_layers = layers
    model.d_model = d_model
    model.num_heads = heads
    model.num_kv_heads = kv_heads
    model.head_dim = 128
    model.d_ff = d_ff
    model.vocab_size = 32_000

    data = ml_collections.ConfigDict()
    data.global_batch_size = 1024
    data.seq_len = 4096

    optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = rate
    optimizer.warmup_steps = 2_000

    layout = ml_collections.ConfigDict()
    layout.data = 1
    layout.fsdp = -1
    layout.zero_stage = 3
    layout.microbatches = microbatches
    layout.remat = "full"

    run = ml_collections.ConfigDict()
    run.steps = 480_000
    run.eval_every = 1_000
    run.checkpoint_every = 1_000

    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
