"""Gemma 2 9B (arXiv 2408.00118), from scratch.

Command: python -m jaxscale.train --config configs/gemma2_9b.py --workdir runs/gemma2_9b
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: 64 accelerators of 32 GB or more; one sequence per micro-batch each.
Parameters: 9,241,705,984, 917,504,000 of which are the embedding, tied to the head.
Expected: not measured yet.
"""

import ml_collections


def get_config():
    """The shape is published; the run is a choice of ours: 4M tokens a step, 420B tokens in all."""
    model = ml_collections.ConfigDict()
    model.family = "gemma2"
    model.num_layers = 42
    model.d_model = 3_584
    model.num_heads = 16
    model.num_kv_heads = 8
    model.head_dim = 256
    model.d_ff = 14_336
    model.vocab_size = 256_000

    data = ml_collections.ConfigDict()
    data.global_batch_size = 512
    data.seq_len = 8192

    optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = 3e-4
    optimizer.warmup_steps = 2_000

    layout = ml_collections.ConfigDict()
    layout.data = 1
    layout.fsdp = -1
    layout.zero_stage = 3
    layout.microbatches = 8
    layout.remat = "full"

    run = ml_collections.ConfigDict()
    run.steps = 100_000
    run.eval_every = 1_000
    run.checkpoint_every = 1_000

    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
