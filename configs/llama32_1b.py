"""Llama 3.2 1B, from scratch.

Command: python -m jaxscale.train --config configs/llama32_1b.py --workdir runs/llama32_1b
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: 8 accelerators of 80 GB or more (4 sequences per micro-batch each); on one of them,
  --config.layout.microbatches=64.
Parameters: 1,235,814,400.
Expected: not measured yet on several. On one H200 55 to 56 % MFU at 16 sequences a step, with
  --config.data.global_batch_size=16 --config.data.objective=causal_across_documents
  --config.layout.microbatches=1 --config.layout.unroll_layers=True --config.layout.remat=none
  (docs/benchmarks.md).
"""

import ml_collections


def get_config():
    """The shape is published; the run is a choice of ours: 1M tokens a step, 105B tokens in all."""
    model = ml_collections.ConfigDict()
    model.num_layers = 16
    model.d_model = 2_048
    model.num_heads = 32
    model.num_kv_heads = 8
    model.head_dim = 64
    model.d_ff = 8_192
    model.vocab_size = 128_256
    model.rope_theta = 500_000.0
    model.rope_scaling = "llama3"
    model.rope_factor = 32.0
    model.tied_embeddings = True

    data = ml_collections.ConfigDict()
    data.global_batch_size = 256
    data.seq_len = 4096

    optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = 3e-4
    optimizer.warmup_steps = 2_000

    layout = ml_collections.ConfigDict()
    layout.data = 1
    layout.fsdp = -1
    layout.zero_stage = 3
    layout.microbatches = 8
    layout.remat = "auto"

    run = ml_collections.ConfigDict()
    run.steps = 100_000
    run.eval_every = 1_000
    run.checkpoint_every = 1_000

    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
