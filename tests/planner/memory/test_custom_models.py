"""Memory of custom models, whose temporaries are predicted by liveness, against compiled steps.

Each figure is the total of the step's `memory_analysis` (jaxlib 0.12.0.1), for eight CPUs, and for
eight H200 with `compiled.topology`.
"""

GATED = {"d_model": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
MODELS = {
    # Of docs/own_model.md.
    "gated branches": {"family": "tests.docs_model:MyModel", **GATED, "d_ff": 1024},
    "two stacks": {"family": "tests.models.two_stacks:make", "vocab_size": 64, "head_dim": 8},
    "gated convolution": {
        "family": "tests.models.gated_convolution:make",
        **{"width": 256, "hidden": 1024, "vocab_size": 512},
    },
}
FULL, NONE = {"fsdp": 8, "remat": "full"}, {"fsdp": 8, "remat": "none"}
HALVES = {"data": 8, "zero_stage": 1, "remat": "none", "microbatches": 2}
BOTH = {"fsdp": 4, "tensor": 2, "remat": "full", "microbatches": 2}
PIPELINE = {"pipeline": 2, "fsdp": 4, "schedule": "1f1b", "microbatches": 4, "zero_stage": 1}
