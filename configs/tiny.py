"""The smallest model with every part, for tests and for trying a layout.

Command: python -m jaxscale.train --config configs/tiny.py --workdir runs/tiny
Hardware: one CPU core, or eight virtual devices.
Expected: a few steps in seconds; the losses have no meaning.
"""

import ml_collections


def get_config():
    """Bytes as tokens (257: with the end of a document), two query heads to a key head."""
    model = ml_collections.ConfigDict()
    model.num_layers = 2
    model.d_model = 64
    model.num_heads = 4
    model.num_kv_heads = 2
    model.head_dim = 16
    model.d_ff = 128
    model.vocab_size = 257
    model.compute_dtype = "float32"

    data = ml_collections.ConfigDict()
    data.source = ("{stdlib}/asyncio/*.py",)
    data.global_batch_size = 8
    data.seq_len = 64

    run = ml_collections.ConfigDict()
    run.steps = 5

    optimizer = ml_collections.ConfigDict()
    layout = ml_collections.ConfigDict()
    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
