"""mT5 Small, from scratch (arXiv 2010.11934).

Command: python -m jaxscale.train --config configs/mt5_small.py --workdir runs/mt5_small
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: 1 accelerator of 80 GB; set layout.microbatches to what fits.
Parameters: 300,176,768.
Expected: not measured yet.
"""

import ml_collections


def get_config():
    """The shape is published, and so are batch, lengths and objective: a million tokens a step."""
    model = ml_collections.ConfigDict()
    model.family = "mt5"
    model.num_layers = 8  # of the decoder
    model.num_encoder_layers = 8
    model.d_model = 512
    model.num_heads = 6
    model.num_kv_heads = 6
    model.head_dim = 64
    model.d_ff = 1024
    model.vocab_size = 250_112

    data = ml_collections.ConfigDict()
    data.objective = "span_corruption"
    data.global_batch_size = 1024
    data.seq_len = 1024
    data.target_len = 256

    optimizer = ml_collections.ConfigDict()
    optimizer.name = "adafactor"
    optimizer.learning_rate = 1e-3
    optimizer.warmup_steps = 10_000

    layout = ml_collections.ConfigDict()
    layout.data = 1
    layout.fsdp = -1
    layout.zero_stage = 2
    layout.microbatches = 8
    layout.remat = "full"

    run = ml_collections.ConfigDict()
    run.steps = 1_000_000
    run.eval_every = 5_000
    run.checkpoint_every = 5_000

    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
