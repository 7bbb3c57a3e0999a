"""The 22B GPT whose throughput was measured on Frontier (arXiv 2312.12705).

Command: python -m jaxscale.train --config configs/gpt_22b.py --workdir runs/gpt_22b
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: 16 accelerators of 64 GB (the paper: 16 MI250X dies); 1 sequence per micro-batch each.
Parameters: 22,071,128,064.
Expected: the paper reports 38.4 % of peak with its own layout; here not measured yet.
"""

import ml_collections


def get_config():
    """The paper measures throughput and trains nothing to the end: run.steps keeps its default."""
    model = ml_collections.ConfigDict()
    model.family = "gpt"
    model.num_layers = 48
    model.d_model = 6_144
    model.num_heads = 48
    model.num_kv_heads = 48
    model.head_dim = 128
    model.d_ff = 24_576
    model.vocab_size = 50_688
    model.tied_embeddings = True

    data = ml_collections.ConfigDict()
    data.global_batch_size = 640
    data.seq_len = 2048

    optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = 6e-5

    layout = ml_collections.ConfigDict()
    layout.data = 1
    layout.fsdp = -1
    layout.zero_stage = 3
    layout.microbatches = 40
    layout.remat = "full"

    run = ml_collections.ConfigDict()
    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
