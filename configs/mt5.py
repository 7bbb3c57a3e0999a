"""mT5 Small, Base, Large, XL and XXL, from scratch (arXiv 2010.11934).

Command: python -m jaxscale.train --config mt5_small --workdir runs/mt5_small
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: accelerators of 80 GB: 1 for small and base, 8 for large and xl, 64 for xxl; set
  layout.microbatches to what fits.
Parameters: 300,176,768; 582,401,280; 1,229,581,312; 3,742,619,648; 12,921,057,280.
Expected: not measured yet.
"""

import ml_collections

SIZES = {  # layers of encoder and decoder each, d_model, heads, d_ff, ZeRO stage
    "small": (8, 512, 6, 1024, 2),
    "base": (12, 768, 12, 2048, 2),
    "large": (24, 1024, 16, 2816, 2),
    "xl": (24, 2048, 32, 5120, 3),
    "xxl": (24, 4096, 64, 10_240, 3),
}


def get_config(size: str = "small"):
    """The shape is published, and so are batch, lengths and objective: a million tokens a step."""
    layers, d_model, heads, d_ff, zero_stage = SIZES[size]
    model = ml_collections.ConfigDict()
    model.family = "mt5"
    model.num_layers = model.num_encoder_layers = layers
    model.d_model = d_model
    model.num_heads = model.num_kv_heads = heads
    model.head_dim = 64
    model.d_ff = d_ff
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
    layout.zero_stage = zero_stage
    layout.microbatches = 8
    layout.remat = "full"

    run = ml_collections.ConfigDict()
    run.steps = 1_000_000
    run.eval_every = 5_000
    run.checkpoint_every = 5_000

    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
