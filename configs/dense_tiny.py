"""The dense model next to configs/moe_tiny.py, on the source of Python's standard library.

Command: python -m jaxscale.train --config configs/dense_tiny.py --workdir runs/dense_tiny
Hardware: 2 CPU cores; no download, every machine has the text.
Expected: 2.08 validation bits per byte (text of Python 3.12.1), a few minutes.
"""

import ml_collections


def get_config():
    """A byte-pair tokenizer of 4,096 tokens is trained on the text before the first step."""
    model = ml_collections.ConfigDict()
    model.num_layers = 4
    model.d_model = 192
    model.num_heads = 6
    model.num_kv_heads = 2
    model.head_dim = 32
    model.d_ff = 512
    model.vocab_size = 4096
    model.tied_embeddings = True
    model.compute_dtype = "float32"  # a CPU without bfloat16 units only emulates it

    data = ml_collections.ConfigDict()
    data.tokenizer = "bpe:4096"
    data.global_batch_size = 16
    data.seq_len = 256

    optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = 3e-3
    optimizer.warmup_steps = 20

    run = ml_collections.ConfigDict()
    run.steps = 120
    run.eval_every = 40
    run.checkpoint_every = 40

    layout = ml_collections.ConfigDict()
    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
