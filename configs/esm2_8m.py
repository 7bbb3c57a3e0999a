"""ESM-2 8M, a masked protein language model (Lin et al., Science 379, 2023), from scratch.

Command: python -m jaxscale.train --config configs/esm2_8m.py --workdir runs/esm2_8m
  --config.data.source='proteins/*.fasta'
Hardware: one accelerator of 16 GB or more.
Parameters: 7,512,353; transformers has 121 more, of its contact prediction head.
Expected: not measured yet.
"""

import ml_collections


def get_config():
    """Sizes and optimizer are published. The paper takes 2M tokens a step for 500,000 steps, in
    proteins cut to 1024 residues; here they are packed."""
    model = ml_collections.ConfigDict()
    model.family = "esm"
    model.num_layers = 6
    model.d_model = 320
    model.num_heads = 20
    model.num_kv_heads = 20
    model.head_dim = 16
    model.d_ff = 1_280
    model.vocab_size = 33

    data = ml_collections.ConfigDict()
    data.tokenizer = "esm2"
    data.objective = "masked"
    data.global_batch_size = 2_048
    data.seq_len = 1_024

    optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = 4e-4
    optimizer.schedule = "linear"
    optimizer.warmup_steps = 2_000
    optimizer.b2 = 0.98
    optimizer.weight_decay = 0.01

    layout = ml_collections.ConfigDict()
    layout.data = -1
    layout.microbatches = 16

    run = ml_collections.ConfigDict()
    run.steps = 500_000
    run.eval_every = 1_000
    run.checkpoint_every = 5_000

    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
