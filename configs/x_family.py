"""The model family X_x of the layered gradient accumulation paper (arXiv 2106.02679).

Command: python -m jaxscale.train --config configs/x_family.py:32 --workdir runs/x32
Hardware: an accelerator of 80 GB for X_32 (0.4B), 128 for X_108 (176B), 1,024 for X_160 (1.3T);
  set layout.microbatches to what fits.
Parameters: 12 x^5, plus embeddings, biases and norms.
Expected: not measured yet.
"""

import ml_collections


def get_config(arg: str = ""):
    """`arg` is x, 32 by default: width x^2, and x layers of x heads of size x."""
    x = int(arg or 32)
    model = ml_collections.ConfigDict()
    model.family = "gpt"
    model.num_layers = x
    model.d_model = x**2
    model.num_heads = x
    model.num_kv_heads = x
    model.head_dim = x
    model.d_ff = 4 * x**2
    model.vocab_size = 50_688
    model.max_seq_len = 16 * x
    model.tied_embeddings = True

    data = ml_collections.ConfigDict()
    # The critical batch, about 82 x^(2/3) sequences, rounded to what many layouts divide.
    data.global_batch_size = 128 * round(82 * x ** (2 / 3) / 128)
    data.seq_len = 16 * x

    optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = 6e-5

    layout = ml_collections.ConfigDict()
    layout.data = 1
    layout.fsdp = -1
    layout.zero_stage = 3
    layout.remat = "full"

    run = ml_collections.ConfigDict()
    run.steps = 100_000

    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
