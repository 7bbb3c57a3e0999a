"""A decoder of 8 layers, 256 wide, with 32,000 tokens: small enough to time on a CPU.

Command: python tools/bench/train.py --config configs/bench_8x256.py
Hardware: one CPU core or more; or --config.layout.fsdp=8 on eight virtual devices.
Expected: at least the speed of the same model written plainly (the command prints both).
"""

import ml_collections


def get_config():
    """24,776,960 parameters, most of them in the embedding and the head."""
    model = ml_collections.ConfigDict()
    model.num_layers = 8
    model.d_model = 256
    model.num_heads = 8
    model.num_kv_heads = 8
    model.head_dim = 32
    model.d_ff = 1_024
    model.vocab_size = 32_000
    model.compute_dtype = "float32"

    data = ml_collections.ConfigDict()
    data.global_batch_size = 8
    data.seq_len = 512

    optimizer = ml_collections.ConfigDict()
    layout = ml_collections.ConfigDict()
    run = ml_collections.ConfigDict()
    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
