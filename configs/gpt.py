"""GPT models of 22B, 175B and 1T parameters, measured on Frontier (arXiv 2312.12705).

Command: python -m jaxscale.train --config gpt_22b --workdir runs/gpt_22b
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: accelerators of 64 GB: 16 for 22b and 128 for 175b (the paper: as many MI250X dies), 1
  sequence per micro-batch each; 1,024 for 1t, 1 sequence for each group of 8.
Parameters: 22,071,128,064; 174,609,555,456; 1,008,025,651,200.
Expected: the paper reports 38.4 % of peak for 22b and 36.1 % for 175b with its own layouts; here
  not measured yet. docs/compile_ahead.md has the step of 1t, compiled for 2,048 TPU v5p.
"""

import ml_collections

SIZES = {  # layers, d_model, heads, sequences, tensor, micro-batches
    "22b": (48, 6_144, 48, 640, 1, 40),
    "175b": (96, 12_288, 96, 640, 1, 5),
    "1t": (128, 25_600, 200, 1024, 8, 8),
}


def get_config(size: str = "22b"):
    """The paper measures throughput and trains nothing to the end: run.steps keeps its default."""
    layers, d_model, heads, sequences, tensor, microbatches = SIZES[size]
    model = ml_collections.ConfigDict()
    model.family = "gpt"
    model.num_layers = layers
    model.d_model = d_model
    model.num_heads = heads
    model.num_kv_heads = heads
    model.head_dim = 128
    model.d_ff = 4 * d_model
    model.vocab_size = 50_688
    model.tied_embeddings = True

    data = ml_collections.ConfigDict()
    data.global_batch_size = sequences
    data.seq_len = 2048

    optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = 6e-5

    layout = ml_collections.ConfigDict()
    layout.data = 1
    layout.fsdp = -1
    layout.tensor = tensor
    layout.zero_stage = 3
    layout.microbatches = microbatches
    layout.remat = "full"

    run = ml_collections.ConfigDict()
    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
