"""A small Llama-style decoder on the source of Python's own standard library.

Command: python -m jaxscale.train --config configs/quickstart.py --workdir runs/quickstart
Hardware: 2 CPU cores; no download, every machine has the text.
Expected: about 1.6 validation bits per byte (text of Python 3.12.1); docs/benchmarks.md has its
  time.
"""

import ml_collections


def get_config():
    """A byte-pair tokenizer of 2,048 tokens is trained on the text before the first step."""
    model = ml_collections.ConfigDict()
    model.num_layers = 4
    model.d_model = 128
    model.num_heads = 4
    model.num_kv_heads = 2
    model.head_dim = 32
    model.d_ff = 384
    model.vocab_size = 2048
    model.tied_embeddings = True
    model.compute_dtype = "float32"  # a CPU without bfloat16 units only emulates it

    data = ml_collections.ConfigDict()
    data.tokenizer = "bpe:2048"
    data.global_batch_size = 8
    data.seq_len = 256

    optimizer = ml_collections.ConfigDict()
    optimizer.name = "muon"
    optimizer.learning_rate = 7e-3
    optimizer.warmup_steps = 20

    run = ml_collections.ConfigDict()
    run.steps = 640
    run.eval_every = 160
    run.eval_batches = 32
    run.checkpoint_every = 160

    layout = ml_collections.ConfigDict()
    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
