"""Llama 2 7B (arXiv 2307.09288), from scratch.

Command: python -m jaxscale.train --config configs/llama2_7b.py --workdir runs/llama2_7b
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: 64 accelerators of 80 GB or more; 4 sequences per micro-batch each.
Parameters: 6,738,415,616.
Expected: not measured yet.
"""

import ml_collections


def get_config():
    """Batch, schedule and learning rate as published: 4M tokens a step, 2T tokens in all."""
    model = ml_collections.ConfigDict()
    model.num_layers = 32
    model.d_model = 4_096
    model.num_heads = 32
    model.num_kv_heads = 32
    model.head_dim = 128
    model.d_ff = 11_008
    model.vocab_size = 32_000

    data = ml_collections.ConfigDict()
    data.global_batch_size = 1024
    data.seq_len = 4096

    optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = 3e-4
    optimizer.warmup_steps = 2_000

    layout = ml_collections.ConfigDict()
    layout.data = 1
    layout.fsdp = -1
    layout.zero_stage = 3
    layout.microbatches = 4
    layout.remat = "full"

    run = ml_collections.ConfigDict()
    run.steps = 480_000
    run.eval_every = 1_000
    run.checkpoint_every = 1_000

    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
