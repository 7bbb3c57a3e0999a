"""The 1T GPT whose throughput was measured on Frontier (arXiv 2312.12705).

Command: python -m jaxscale.train --config configs/gpt_1t.py --workdir runs/gpt_1t
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: 1,024 accelerators of 64 GB or more; 1 sequence per micro-batch for each group of 8.
Parameters: 1,008,025,651,200.
Expected: not measured yet; docs/compile_ahead.md has its step, compiled for 2,048 TPU v5p.
"""

import ml_collections


def get_config():
    """The paper measures throughput and trains nothing to the end: run.steps keeps its default."""
    model = ml_collections.ConfigDict()
    model.family = "gpt"
    model.num_layers = 128
    model.d_model = 25_600
    model.num_heads = 200
    model.num_kv_heads = 200
    model.head_dim = 128
    model.d_ff = 102_400
    model.vocab_size = 50_688
    model.tied_embeddings = True

    data = ml_collections.ConfigDict()
    data.global_batch_size = 1024
    data.seq_len = 2048

    optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = 6e-5

    layout = ml_collections.ConfigDict()
    layout.data = 1
    layout.fsdp = -1
    layout.tensor = 8
    layout.zero_stage = 3
    layout.microbatches = 8
    layout.remat = "full"

    run = ml_collections.ConfigDict()
    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
