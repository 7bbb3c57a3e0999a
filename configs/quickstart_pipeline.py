"""A first pipeline: configs/dense_tiny.py on eight virtual devices, pipeline 4 x tensor 2.

Command: JAX_NUM_CPU_DEVICES=8 python -m jaxscale.train --config configs/quickstart_pipeline.py
  --workdir runs/quickstart_pipeline
Hardware: 2 CPU cores.
Expected: the losses of configs/dense_tiny.py.
"""

import ml_collections


def get_config():
    """The model, data and steps of configs/dense_tiny.py with another layout."""
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
    layout.data = 1
    layout.pipeline = 4
    layout.tensor = 2
    layout.schedule = "zb_h1"
    layout.microbatches = 8
    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
