"""M6-T of 10B, 100B and 1T (arXiv 2105.15082), from scratch, on text.

Command: python -m jaxscale.train --config m6_t_10b --workdir runs/m6_t_10b
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: accelerators of 80 GB: 8 for 10b, 128 for 100b, 1,024 for 1t.
Parameters: 10,814,572,544, of which 10,737,418,240 are experts'; 103,226,476,544, 103,079,215,104;
  1,002,764,699,648, 1,002,606,428,160.
Expected: not measured yet.
"""

import ml_collections

SIZES = {  # layers, d_ff of an expert, experts, sequences, ranks of expert, micro-batches
    "10b": (10, 4_096, 128, 512, 8, 8),
    "100b": (24, 4_096, 512, 2048, 64, 4),
    "1t": (24, 21_248, 960, 4096, 64, 2),
}


def get_config(size: str = "10b"):
    """Layers, widths and experts as published; vocabulary, heads and the run are ours."""
    layers, d_ff, experts, sequences, ranks, microbatches = SIZES[size]
    model = ml_collections.ConfigDict()
    model.family = "m6_t"
    model.num_layers = layers
    model.d_model = 1024
    model.num_heads = 16
    model.num_kv_heads = 16
    model.head_dim = 64
    model.d_ff = d_ff
    model.vocab_size = 32_000
    model.num_experts = experts
    model.experts_per_token = 2  # one of each half
    model.max_seq_len = 1024

    data = ml_collections.ConfigDict()
    data.global_batch_size = sequences
    data.seq_len = 1024

    optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = 1e-4
    optimizer.warmup_steps = 1_000

    layout = ml_collections.ConfigDict()
    layout.data = 1
    layout.fsdp = -1
    layout.expert = ranks
    layout.zero_stage = 3
    layout.microbatches = microbatches
    layout.remat = "full"

    run = ml_collections.ConfigDict()
    run.steps = 100_000
    run.eval_every = 1_000
    run.checkpoint_every = 1_000

    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
