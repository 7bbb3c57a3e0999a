"""Llama 2 70B (arXiv 2307.09288), from scratch.

Command: python -m jaxscale.train --config configs/llama2_70b.py --workdir runs/llama2_70b
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: 512 accelerators of 80 GB or more; 1 sequence a micro-batch each.
Parameters: 68,976,648,192.
Expected: not measured yet.
"""

import ml_collections


def get_config():
    """Batch, schedule and learning rate as published: 4M tokens a step, 2T tokens in all."""
    model = ml_collections.ConfigDict()
    model.num_layers = 80
    model.d_model = 8_192
    model.num_heads = 64
    model.num_kv_heads = 8
    model.head_dim = 128
    model.d_ff = 28_672
    model.vocab_size = 32_000

    data = ml_collections.ConfigDict()
    data.global_batch_size = 1024
    data.seq_len = 4096

    optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = 1.5e-4
    optimizer.warmup_steps = 2_000

    layout = ml_collections.ConfigDict()
    layout.data = 1
    layout.fsdp = -1
    layout.zero_stage = 3
    layout.microbatches = 2
    layout.remat = "full"

    run = ml_collections.ConfigDict()
    run.steps = 480_000
    run.eval_every = 1_000
    run.checkpoint_every = 1_000

    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
