"""M6-T 100B (arXiv 2105.15082), from scratch, on text.

Command: python -m jaxscale.train --config configs/m6_t_100b.py --workdir runs/m6_t_100b
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: 128 accelerators of 80 GB.
Parameters: 103,226,476,544, of which 103,079,215,104 are experts'.
Expected: not measured yet.
"""

import ml_collections


def get_config():
    """Layers, widths and experts as published; vocabulary, heads and the run are ours."""
    model = ml_collections.ConfigDict()
    model.family = "m6_t"
    model.num_layers = 24
    model.d_model = 1024
    model.num_heads = 16
    model.num_kv_heads = 16
    model.head_dim = 64
    model.d_ff = 4096  # of an expert
    model.vocab_size = 32_000
    model.num_experts = 512
    model.experts_per_token = 2  # one of each half
    model.max_seq_len = 1024

    data = ml_collections.ConfigDict()
    data.global_batch_size = 2048
    data.seq_len = 1024

    optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = 1e-4
    optimizer.warmup_steps = 1_000

    layout = ml_collections.ConfigDict()
    layout.data = 1
    layout.fsdp = -1
    layout.expert = 64
    layout.zero_stage = 3
    layout.microbatches = 4
    layout.remat = "full"

    run = ml_collections.ConfigDict()
    run.steps = 100_000
    run.eval_every = 1_000
    run.checkpoint_every = 1_000

    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
