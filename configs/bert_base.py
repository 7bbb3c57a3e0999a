"""BERT base, uncased (arXiv 1810.04805): masked prediction only, from scratch.

Command: python -m jaxscale.train --config configs/bert_base.py --workdir runs/bert_base
  --config.data.source=TEXT_FILES --config.data.tokenizer=tokenizer.json
Hardware: 8 accelerators of 40 GB or more; 8 sequences per micro-batch each.
Parameters: 109,514,298, without the pooler.
Expected: not measured yet.
"""

import ml_collections


def get_config():
    """Sizes and optimizer are published; there is no next-sentence objective, so that all texts are
    packed as token type 0, and every step has 512 tokens a sequence."""
    model = ml_collections.ConfigDict()
    model.family = "bert"
    model.num_layers = 12
    model.d_model = 768
    model.num_heads = 12
    model.num_kv_heads = 12
    model.head_dim = 64
    model.d_ff = 3_072
    model.vocab_size = 30_522
    model.max_seq_len = 512

    data = ml_collections.ConfigDict()
    data.objective = "masked"
    data.global_batch_size = 256
    data.seq_len = 512

    optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = 1e-4
    optimizer.schedule = "linear"
    optimizer.final_learning_rate = 0.0
    optimizer.warmup_steps = 10_000
    optimizer.b2 = 0.999
    optimizer.weight_decay = 0.01

    layout = ml_collections.ConfigDict()
    layout.data = -1
    layout.microbatches = 4

    run = ml_collections.ConfigDict()
    run.steps = 1_000_000
    run.eval_every = 1_000
    run.checkpoint_every = 5_000

    return ml_collections.ConfigDict(
        {"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}
    )
