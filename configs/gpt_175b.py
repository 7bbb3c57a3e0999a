"""The 175B GPT whose throughput was measured on Frontier (arXiv 2312.12705).

Command: python -m jaxscale.train --config configs/gpt_175b.py --workdir runs/gpt_175b
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: 128 accelerators of 64 GB (the paper: 128 MI250X dies); 1 sequence per micro-batch each.
Parameters: 174,609,555,456.
Expected: the paper reports 36.1 % of peak with its own layout; here not measured yet.
"""

import ml_collections


def get_config():
    """The paper measures throughput and trains nothing to the end: run.steps keeps its default."""
    model = ml_collections.ConfigDict()
    model.family = "gpt"
    model.num_layers = 96
    model.d_model = 12_288
    model.num_heads = 96
    model.num_kv_heads = 96
    model.head_dim = 128
    model.d_ff = 49_152
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
    layout.microbatches = 5
    layout.remat = "full"

    run = ml_collections.ConfigDict()
    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
