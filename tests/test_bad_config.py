"""Bad configurations and bad input: each is refused with a message that names the setting.

A row is what is wrong and a part of the message. Add rows where a table fits: overrides of an
otherwise good configuration, files that are not good ones, names of files, saved configurations.
What needs devices or data is refused later, and tested with the code that refuses it.
"""

import pytest

from jaxscale import config
from jaxscale.config.model import ModelConfig

# Overrides of the defaults, several where only together they are wrong.
OVERRIDES = [
    # keys
    ("model.num_layer=3", "config.model.num_layer; did you mean --config.model.num_layers?"),
    ("modle.num_layers=3", "config.modle; did you mean --config.model.num_layers?"),
    ("modle.nothing=3", "unknown section config.modle; did you mean --config.model?"),
    ("num_layers=3", "config.num_layers; did you mean --config.model.num_layers?"),
    ("lr=3", "config.lr; did you mean --config.optimizer.learning_rate?"),
    ("optimizer.lr=3", "config.optimizer.lr; did you mean --config.optimizer.learning_rate?"),
    ("mesh.tp=3", "unknown section config.mesh; did you mean --config.layout.tensor?"),
    ("data.path=a.txt", "unknown key config.data.path; did you mean --config.data.source?"),
    ("model.top_k=2", "config.model.top_k; did you mean --config.model.experts_per_token?"),
    ("model.aux_loss=0.1", "did you mean --config.model.balance_weight?"),
    ("model.shared_experts=1", "did you mean --config.model.shared_d_ff?"),
    ("run.save_every=3", "config.run.save_every; did you mean --config.run.checkpoint_every?"),
    ("run.num_epochs=3", "config.run.num_epochs; did you mean --config.run.epochs?"),
    ("run.noise_every=-1", "run.noise_every = -1 is too small; at least 0"),
    (
        "data.batch_schedule=3",
        "expected steps with numbers of sequences, such as {0: 64, 2000: 128}",
    ),
    ("data.batch_schedule={0:2}", "ends with 2 sequences, and data.global_batch_size = 8; set"),
    (
        "data.batch_schedule={0:2,5:8} run.epochs=2",
        "run.epochs = 2.0 with data.batch_schedule is not available in this version; set run.steps",
    ),
    (
        "data.batch_schedule={0:2,5:8} optimizer.table_staleness=2",
        "optimizer.table_staleness = 2 with data.batch_schedule is not available in this version",
    ),
    ("run.epochs=-1", "run.epochs = -1.0 is too small; at least 0"),
    ("run.epochs=2 run.steps=3", "run.steps = 3 and run.epochs = 2 exclude each other; leave"),
    ("optimizer.min_lr=0", "did you mean --config.optimizer.final_learning_rate?"),
    ("run.seq_len=3", "config.run.seq_len; did you mean --config.data.seq_len?"),
    ("model.soft_prompt=3", "did you mean --config.model.prompt_tokens?"),
    ("model.side_network=3", "did you mean --config.model.side_width?"),
    ("model.side_width=-1", "model.side_width = -1 is too small; at least 0"),
    ("model.base_dtype=int4", "model.base_dtype = 'int4' is not known; it can be '', nf4, mxfp4"),
    ("model.base_dtype=nf4", "without adapters all weights are trained; set model.lora_rank"),
    ("model.base_targets=q", "with model.base_dtype = '' (no quantised weights); set"),
    ("model.prompt_tokens=-1", "model.prompt_tokens = -1 is too small; at least 0"),
    ("model.side_width=8 model.lora_rank=4", "are 2 kinds of adapters, and a model has one; set"),
    (
        "model.side_width=8 layout.pipeline=2 layout.remat=full",
        "layout.remat = 'full' repeats whole forward passes of a pipeline, and next",
    ),
    ("layout.pipelines=2", "did you mean --config.layout.pipeline?"),
    ("model.layers.num=3", "unknown key config.model.layers.num"),
    ("model.num_layers", "--config.model.num_layers: expected --config.section.key=value"),
    ("model=3", "--config.model=3: expected --config.section.key=value"),
    ("=3", "unknown section config."),
    ("--config.model.num_layers=3", "leave out '--config.', which is for the command line"),
    (
        "model.family=t5 model.relative_max_distance=12",
        "model.relative_buckets = 32, of which the first 16 have one distance each; set "
        "model.relative_max_distance = 17 or more",
    ),
    # types
    ("model.num_layers=2.5", "config.model.num_layers = 2.5 is of type float; expected a whole"),
    ("model.num_layers=two", "config.model.num_layers = 'two' is of type str; expected a whole"),
    ("model.num_layers=", "config.model.num_layers = ''"),
    ("model.num_layers=True", "config.model.num_layers = True is of type bool"),
    ("model.num_layers=None", "config.model.num_layers = None is of type NoneType"),
    ("model.d_model=10**3", "config.model.d_model = '10**3'"),
    ("model.tied_embeddings=1", "config.model.tied_embeddings = 1 is of type int; expected True"),
    ("model.tied_embeddings=false", "config.model.tied_embeddings = 'false'"),
    ("optimizer.learning_rate=fast", "config.optimizer.learning_rate = 'fast'"),
    ("optimizer.learning_rate=1e999", "config.optimizer.learning_rate = inf is not a finite"),
    ("data.source=(1,2)", "data.source[0] = 1 is of type int; expected a path, or a mapping"),
    ("data.text_begin=bos", "data.text_begin = 'bos' is not known; it can be tokenizer, boundary"),
    ("data.source=[", "config.data.source = '['"),
    (
        "data.source=[{'path':'a','name':'b'}]",
        "data.source[0]['name'] = 'b' is for entries of data",
    ),
    ("data.source=[{'path':'a','prompt':'b'}]", "prompt = 'b', response = ''; give the fields of"),
    ("data.source=[{'path':'a','messages':'b','response':'c'}]", "messages = 'b' excludes prompt"),
    ("data.source=[{'path':'a','messages':'b','field':'c'}]", "field = 'c' is for plain text"),
    ("data.source=[{'path':'a','messages':'b','format':'fasta'}]", "'fasta' has no fields for"),
    (
        "data.source=[{'path':'a','messages':'b','max_document_bytes':9}]",
        "max_document_bytes = 9 would split a response from its prompt; set long_documents",
    ),
    ("data.validation=a.txt", "data.validation[0]['name'] = '' must be letters, digits"),
    ("data.validation=[{'path':'a','name':'b/c'}]", "data.validation[0]['name'] = 'b/c' must be"),
    (
        "data.validation=[{'path':'a','name':'b'},{'path':'c','name':'b'}]",
        "data.validation[1]['name'] = 'b' is the name of an earlier entry",
    ),
    (
        "data.validation=[{'path':'a','name':'b','weight':2}]",
        "data.validation[0]['weight'] is for data.source; leave it out",
    ),
    (
        "data.objective=causal_across_documents model.family=esm",
        "'causal_across_documents' needs causal attention, and this model (model.family = 'esm') "
        "is not causal; set data.objective to masked, or set model.causal = True",
    ),
    (
        "data.objective=causal_across_documents data.target_len=8",
        "data.objective = 'causal_across_documents' does not train; set data.objective to prefix",
    ),
    (
        "data.objective=masked",
        "set data.objective to causal, causal_across_documents, prefix, span_corruption or ul2",
    ),
    (f"run.steps={10**30}", f"run.steps = {10**30} is too large; at most 2147483647"),
    # the model
    ("model.num_layers=0", "model.num_layers = 0 is too small; at least 1"),
    ("model.vocab_size=1", "model.vocab_size = 1 is too small; at least 2"),
    (
        "model.num_kv_heads=3",
        "model.num_heads = 4 is not a multiple of model.num_kv_heads = 3; set model.num_kv_heads = "
        "2 or 4",
    ),
    ("model.head_dim=7", "model.head_dim = 7 is odd"),
    ("model.rope_theta=0", "model.rope_theta = 0.0 must be positive"),
    (
        "model.rope_scaling=8",
        "model.rope_scaling = '8' is not known; it can be none, linear, llama3",
    ),
    (
        "model.rope_scaling=longrope model.rope_short_factors=1,2.5",
        r"model.rope_short_factors = (1.0, 2.5) must be 8 numbers above 0",
    ),
    ("model.rope_long_factors=1", "model.rope_long_factors = (1.0,) must be 0 numbers above 0"),
    ("model.rope_long_factors=x", "config.model.rope_long_factors = '(x,)' is of type str; expec"),
    (
        "model.rope_scaling=dynamic model.rope_length=8",
        "model.rope_length = 8 is less than data.seq_len = 128; set model.rope_length = 0",
    ),
    (
        "model.family=phi3 model.rope_scaling=dynamic model.rope_share=0.125",
        "model.rope_scaling = 'dynamic' with 2 rotated features of a head; at least 4",
    ),
    ("model.rope_scaling=yarn model.rope_factor=0.5", "model.rope_factor = 0.5 is too small"),
    ("model.rope_factor=8", "model.rope_factor = 8.0 scales nothing; set model.rope_scaling"),
    (
        "model.rope_scaling=llama3 model.rope_low_turns=4",
        "model.rope_low_turns = 4.0 must be below model.rope_high_turns = 4.0",
    ),
    ("model.family=phi3 model.rope_share=1.5", "model.rope_share = 1.5 must be above 0 and at mo"),
    ("model.family=phi3 model.rope_share=0.2", "head_dim = 16, of which 3 are rotated, is odd"),
    (
        "model.family=gemma2 model.layer_pattern=LX",
        "model.layer_pattern = 'LX' has other letters than L",
    ),
    ("model.family=gemma2 model.sliding_window=0", "has local layers; set model.sliding_window"),
    ("model.activation=swiglu", "model.activation = 'swiglu' is not known; it can be silu, gelu"),
    # options that the family does not have
    ("model.norm=layer", "model.norm is not a setting of model.family = 'llama'; its settings are"),
    ("model.norm=layer", "did you mean 'qk_norm'?"),
    (
        "model.attention_soft_cap=50",
        "tied_embeddings; attention_soft_cap is one of gemma2",
    ),
    ("model.family=qwen3 model.qk_norm=False", "qk_norm is one of llama, gpt"),
    ("model.sliding_window=-1", "model.sliding_window = -1 is too small"),
    ("model.logit_soft_cap=-5", "model.logit_soft_cap = -5.0 is too small"),
    ("model.z_loss=-1", "model.z_loss = -1.0 is too small"),
    ("model.family=gtp", "model.family = 'gtp' is not known; it can be llama, mistral"),
    ("model.attention=splsh", "model.attention = 'splsh' is not known"),
    ("model.compute_dtype=bf16", "model.compute_dtype = 'bf16' is not known"),
    ("model.param_dtype=float16", "model.param_dtype = 'float16' is not known"),
    ("model.matmul_dtype=fp8", "model.matmul_dtype = 'fp8' is not known; it can be"),
    ("model.family=gpt model.rope_theta=500", "model.rope_theta is not a setting of model.family"),
    (
        "model.family=gpt model.tied_embeddings=True data.seq_len=4096",
        "data.seq_len = 4096 is more than model.max_seq_len = 2048, the number of learned "
        "positions; lower data.seq_len or raise model.max_seq_len",
    ),
    # data
    ("data.source=", "data.source[0]: path = ('',) is empty or has an empty path"),
    ("data.validation=", "data.validation[0]: path = ('',) is empty or has an empty path"),
    (
        "data.validation={'name':'a','path':'b','skip_share':3}",
        "data.validation[0]: skip_share = 3.0 must be at least 0 and below 1",
    ),
    (
        "data.validation={'name':'a','path':'b','boundary':'lines'}",
        "data.validation[0]: boundary = 'lines' is not known",
    ),
    (
        "data.validation={'name':'a','path':'b','prompt':'q'}",
        "data.validation[0]: prompt = 'q', response = ''; give the fields of both",
    ),
    ("model.matmul_dtype=fp8", "it can be '', float8, int8"),
    ("data.source=()", "data.source = () is empty; give files"),
    ("data.global_batch_size=0", "data.global_batch_size = 0 is too small"),
    ("data.seq_len=1", "data.seq_len = 1 is too small; at least 2"),
    ("data.heldout=1", "data.heldout = 1.0 must be at least 0 and below 1"),
    ("data.heldout=-0.1", "data.heldout = -0.1 must be at least 0"),
    ("data.seed=-1", "data.seed = -1 must be at least 0"),
    ("data.seed=99999999999", "data.seed = 99999999999 must be at least 0 and below 2**32"),
    ("data.workers=-1", "data.workers = -1 is too small"),
    # the optimizer
    ("optimizer.name=adam", "optimizer.name = 'adam' is not known; it can be adamw"),
    ("optimizer.schedule=cosin", "optimizer.schedule = 'cosin' is not known"),
    ("optimizer.learning_rate=-1", "optimizer.learning_rate = -1.0 is too small"),
    ("optimizer.final_learning_rate=2", "optimizer.final_learning_rate = 2.0 is a share of"),
    ("optimizer.b1=1", "optimizer.b1 = 1.0 must be below 1"),
    ("optimizer.b2=1.5", "optimizer.b2 = 1.5 must be below 1"),
    (
        "optimizer.epsilon=0",
        "optimizer.epsilon = 0.0 is too small; at least 1.18e-38, such as 1e-8",
    ),
    (
        "optimizer.epsilon=1e-46",
        "of a parameter without a gradient, such as an unused token's, is 0 / 0",
    ),
    ("optimizer.clip_norm=-1", "optimizer.clip_norm = -1.0 is too small"),
    ("optimizer.table_staleness=-1", "optimizer.table_staleness = -1 is too small; at least 0"),
    ("optimizer.mup_base_width=-1", "optimizer.mup_base_width = -1 is too small; at least 0"),
    (
        "optimizer.mup_base_width=32 model.tied_embeddings=True",
        "model.tied_embeddings = True makes them one; set model.tied_embeddings = False",
    ),
    ("optimizer.mup_base_width=32 model.lora_rank=4", "of all weights, and adapters freeze them"),
    (
        "optimizer.mup_base_width=32 model.family=gemma2 model.tied_embeddings=False",
        "without multipliers, and model.scaled_embedding = True (model.family = 'gemma2') multip",
    ),
    ("optimizer.table_learning_rate=-1", "optimizer.table_learning_rate = -1.0 is too small"),
    ("model.ngram_rows=-1", "model.ngram_rows = -1 is too small; at least 0"),
    ("model.ngram_rows=64 model.lora_rank=4", "not available: adapters train no embedding; set"),
    ("model.ngram_rows=64 model.family=t5", "not available: an encoder-decoder has two texts"),
    (
        "model.ngram_rows=64 model.family=deepseek_v3 model.prediction_depth=1",
        "not available: MTP modules embed later tokens, without their n-grams",
    ),
    ("optimizer.warmup_steps=-1", "optimizer.warmup_steps = -1 is too small"),
    ("optimizer.warmup_steps=200", "than run.steps = 100; lower optimizer.warmup_steps, or raise"),
    (
        "optimizer.warmup_steps=20 optimizer.schedule_steps=10",
        "optimizer.warmup_steps = 20 is more than optimizer.schedule_steps = 10",
    ),
    ("optimizer.schedule_steps=0", "optimizer.schedule_steps = 0 is too small; at least 1"),
    ("optimizer.schedule_steps=-5", "optimizer.schedule_steps = -5 is too small; at least 1"),
    ("optimizer.schedule_steps=long", "config.optimizer.schedule_steps = 'long' is of type str"),
    ("optimizer.schedule_step=9", "did you mean --config.optimizer.schedule_steps?"),
    ("optimizer.moment_dtype=int8", "optimizer.moment_dtype = 'int8' is not known"),
    ("optimizer.second_moment_dtype=half", "optimizer.second_moment_dtype = 'half' is not known"),
    ("optimizer.second_moment_dtype=bfloat16", "would freeze second moments, which change by less"),
    ("optimizer.moment_dtype=bfloat16 optimizer.b1=0.999", "freeze a moment that decays by"),
    (
        "optimizer.name=adafactor optimizer.b1=0.5",
        "b1 = 0.5 is for adamw, lion, muon; leave it out",
    ),
    (
        "optimizer.name=lion optimizer.second_moment_dtype=bfloat16",
        "is for adamw, adafactor, muon; leave it out with optimizer.name = 'lion'",
    ),
    (
        "optimizer.name=lion optimizer.moment_rounding=stochastic",
        "are not; set optimizer.moment_dtype = 'bfloat16', or",
    ),
    ("optimizer.moment_rounding=up", "optimizer.moment_rounding = 'up' is not known"),
    (
        "optimizer.moment_rounding=stochastic",
        "is for moments in bfloat16, and those of optimizer.name",
    ),
    (
        "optimizer.sparsity=1",
        "optimizer.sparsity = 1.0 is a share of weights; at least 0 and below",
    ),
    (
        "optimizer.sparsity=0.5",
        "optimizer.sparsity needs optimizer.sparsity_steps, the updates over",
    ),
    (
        "optimizer.sparsity=0.5 optimizer.sparsity_steps=0",
        "optimizer.sparsity_steps = 0 is too small; at least 1",
    ),
    (
        "optimizer.sparsity=0.5 optimizer.sparsity_steps=80 optimizer.sparsity_begin=40",
        "optimizer.sparsity_begin + sparsity_steps = 120 is more than run.steps = 100; lower them",
    ),
    ("optimizer.sparsity_begin=-1", "optimizer.sparsity_begin = -1 is too small; at least 0"),
    ("optimizer.sparsity_every=0", "optimizer.sparsity_every = 0 is too small; at least 1"),
    (
        "optimizer.sparsity_pattern=4:2",
        "optimizer.sparsity_pattern = '4:2' is neither 'unstructured' nor N:M with N below M",
    ),
    (
        "optimizer.sparsity=0.75 optimizer.sparsity_steps=9 optimizer.sparsity_pattern=2:4",
        "optimizer.sparsity = 0.75 is not that of optimizer.sparsity_pattern = '2:4', which is 0.5",
    ),
    ("optimizer.accumulation_dtype=half", "optimizer.accumulation_dtype = 'half' is not known"),
    ("optimizer.reduction_dtype=half", "optimizer.reduction_dtype = 'half' is not known"),
    # the layout
    ("layout.data=0", "layout.data = 0; at least 1, or -1"),
    ("layout.tensor=-2", "layout.tensor = -2; at least 1, or -1"),
    ("layout.fsdp=-1", "layout.data and layout.fsdp are both -1"),
    ("layout.zero_stage=4", "layout.zero_stage = 4; it can be 0, 1, 2 or 3"),
    ("layout.microbatches=0", "layout.microbatches = 0 is too small; at least 1"),
    ("layout.accumulation=sequental", "did you mean 'sequential'?"),
    ("layout.schedule=1f2b", "layout.schedule = '1f2b' is not known"),
    ("layout.schedule=1f1b:fuse", "'fuse' is not an option; after the name give :fused"),
    ("layout.schedule=1f1b:3,0", "'3,0' is not an option"),
    ("layout.virtual_stages=-1", "layout.virtual_stages = -1; at least 1, or 0"),
    (
        "layout.pipeline=2 layout.accumulation=layered",
        "set layout.accumulation = 'sequential' and layout.schedule = 'breadth_first'",
    ),
    (
        "layout.pipeline=2 layout.offload=activations layout.remat=full",
        "layout.remat = 'full' with layout.pipeline = 2: a rank saves only the inputs of its",
    ),
    (
        "layout.pipeline=2 layout.remat=offload:query",
        "with layout.pipeline = 2 is not available in this version; set layout.offload = 'activ",
    ),
    (
        "layout.pipeline=2 layout.context=3",
        "layout.context_method = 'ring' with layout.pipeline = 2 needs an even number of ranks",
    ),
    ("layout.context_method=rings", "did you mean 'ring'?"),
    ("layout.context_method=all", "layout.context_method = 'all' is not known; it can be ring, g"),
    ("layout.remat=ful", "layout.remat = 'ful' is not known; it can be none, full"),
    ("layout.remat=savematmuls", "did you mean 'save_matmuls'?"),
    ("layout.remat=save", "layout.remat = 'save' is not known"),
    ("layout.remat=save:", "layout.remat = 'save:': '' is not known; it can be query, key"),
    ("layout.remat=save:mlp_gat", "layout.remat = 'save:mlp_gat': 'mlp_gat' is not known"),
    ("layout.remat=save:mlp_gat", "did you mean 'mlp_gate'?"),
    ("layout.remat=full:query", "layout.remat = 'full:query': 'full' takes no names; write 'full'"),
    ("layout.remat=none:query", "'none' takes no names; write 'none' alone, or save:query"),
    ("layout.remat=save:key,key", "layout.remat = 'save:key,key' names a tensor twice"),
    ("layout.remat=store:key", "layout.remat = 'store' is not known; it can be save, offload,"),
    ("layout.offload=disk", "layout.offload = 'disk' is not known"),
    ("layout.offload=optimiser", "did you mean 'optimizer'?"),
    ("layout.offload=activations,optimizer", "it can be none, optimizer, activations, optimizer,"),
    ("layout.offload_bytes=-1", "layout.offload_bytes = -1 is too small; at least 0"),
    (
        "layout.offload_bytes=8 layout.offload=optimizer",
        "layout.offload_bytes = 8 with layout.offload = 'optimizer': it moves moments first; set",
    ),
    (
        "layout.offload_bytes=8 layout.pipeline=2",
        "layout.offload_bytes = 8 with layout.pipeline = 2 is not available in this version; set",
    ),
    (
        "layout.offload_bytes=8 layout.unroll_layers=True",
        "layout.offload_bytes = 8 with layout.unroll_layers = True is not available in this",
    ),
    # the run
    ("run.steps=0", "run.steps = 0 is too small; at least 1"),
    ("run.seed=-1", "run.seed = -1 must be at least 0"),
    ("run.seed=abc", "config.run.seed = 'abc' is of type str"),
    ("run.eval_every=-1", "run.eval_every = -1 is too small"),
    ("run.eval_batches=0", "run.eval_batches = 0 is too small"),
    ("run.keep_last=0", "run.keep_last = 0 is too small"),
    (
        "run.keep_best=True run.eval_every=20 run.checkpoint_every=30",
        "run.keep_best needs an evaluation for each checkpoint, and run.eval_every = 20 does not "
        "divide run.checkpoint_every = 30; set run.eval_every = 30",
    ),
    ("run.keep_best=True", "set run.eval_every = 100 and run.checkpoint_every, too"),
    (
        "run.keep_every=30",
        "run.keep_every = 30 is not a multiple of run.checkpoint_every = 0; set "
        "run.checkpoint_every = 30",
    ),
    (
        "model.family=mt5 model.num_encoder_layers=2 data.objective=ul2 data.seq_len=64",
        "data.target_len = 0, and model.family = 'mt5' has an encoder; set data.target_len to the "
        "tokens of its decoder, such as 16",
    ),
    (
        "run.keep_every=30 run.checkpoint_every=20",
        "run.keep_every = 30 is not a multiple of run.checkpoint_every = 20; set "
        "run.keep_every = 40",
    ),
]

# The body of a configuration file.
HEAD = "from ml_collections import ConfigDict\n\n\ndef get_config():\n    return "
FILES = [
    ("def get_config(:\n", "SyntaxError"),
    ("import no_such_module\n", "line 1: ModuleNotFoundError: No module named 'no_such_module'"),
    ("model = 3\n", "has no get_config()"),
    ("get_config = 3\n", "has no get_config()"),
    ("def get_config():\n    pass\n", "get_config() must return a ConfigDict, got None"),
    (HEAD + "{'model': {}}\n", "get_config() must return a ConfigDict, got {'model': {}}"),
    (HEAD + "ConfigDict({}['x'])\n", "line 5: KeyError: 'x'"),
    (HEAD + "ConfigDict({'model': 3})\n", "config.model must be a ConfigDict, got 3"),
    (HEAD + "ConfigDict({'optim': {'b1': 0.5}})\n", "config.optim; did you mean config.optimizer"),
    (HEAD + "ConfigDict({'d_model': 3})\n", "config.d_model; did you mean config.model.d_model?"),
    (HEAD + "ConfigDict({'model': {'rope': {'theta': 3}}})\n", "unknown key config.model.rope"),
    (HEAD + "ConfigDict({'model': {'d_model': [3]}})\n", "config.model.d_model = [3]"),
    (HEAD + "ConfigDict({'model': {'d_model': None}})\n", "config.model.d_model = None"),
    (HEAD + "ConfigDict({'data': {'source': 'a.txt'}})\n", "config.data.source = 'a.txt'"),
    (HEAD + "ConfigDict({'run': {'steps': 0}})\n", "run.steps = 0 is too small"),
    (HEAD + "ConfigDict({'optimizer': {'b1': float('nan')}})\n", "config.optimizer.b1 = nan"),
]

# What stands after --config.
NAMES = [
    ("configs/quickstrat.py", "there is no such file"),
    ("configs/quickstrat.py", "quickstart, quickstart_pipeline, qwen3_30b_a3b, tiny, "),
    ("configs/quickstrat.py", "did you mean 'configs/quickstart.py'?"),
    ("quickstrat", "there is no such file; did you mean 'quickstart'? The shipped configurations"),
    ("Llama-3.2-1B", "did you mean 'llama32_1b'?"),
    ("no/such/folder.py", "--config no/such/folder.py: there is no such file"),
    ("configs", "--config configs: there is no such file"),
    ("", "--config : there is no such file"),
    (
        "tests/goldens/llama",
        "jaxscale.convert --from_hf tests/goldens/llama --output RUN; then train",
    ),
    (
        "tests/goldens/llama/config.json",
        "of a Hugging Face model; convert it to a run first: python",
    ),
    ("pyproject.toml", "pyproject.toml"),
    ("configs/tiny.py:3", "get_config() of configs/tiny.py takes no argument"),
    ("configs/x_family.py:many", "ValueError: invalid literal for int()"),
    ("configs/x_family.py:0", "model.num_layers = 0 is too small"),
]

# The config.json of a run, edited by hand.
SAVED = [
    ({"model": 3}, "config.model = 3 is not a section"),
    ({"models": {}}, "unknown section config.models; did you mean config.model?"),
    ({"model": {"layers": 3}}, "unknown key config.model.layers"),
    ({"model": {"d_model": "64"}}, "config.model.d_model = '64'"),
]


def refusal(read, *arguments) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        read(*arguments)
    message = str(caught.value)
    assert "\n" not in message, "a refusal is one line"
    return message


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "config.py"
    file.write_text(HEAD + "ConfigDict()\n")
    return file


@pytest.mark.proof
@pytest.mark.parametrize(("overrides", "fragment"), OVERRIDES)
def test_overrides(path, overrides, fragment):
    assert fragment in refusal(config.load, str(path), overrides.split(" "))


def test_a_block_of_ones_own_that_contradicts_itself():
    options = {"norm_placement": "after_residual", "parallel_block": True}
    said = refusal(lambda: ModelConfig(family="mine:make", **options))
    assert "set model.norm_placement = 'before', 'after' or 'both', or model.parallel_block" in said


def test_overrides_are_a_list(path):
    assert "pass a list: ['run.steps=3']" in refusal(config.load, path, "run.steps=3")


@pytest.mark.parametrize(("text", "fragment"), FILES)
def test_files(path, text, fragment):
    path.write_text(text)
    assert fragment in refusal(config.load, str(path))


def test_a_runs_folder_is_not_its_config(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    said = refusal(config.load, str(tmp_path))
    assert f"is a folder; give the file in it, {tmp_path / 'config.json'}" in said


@pytest.mark.parametrize(("name", "fragment"), NAMES)
def test_names(name, fragment):
    assert fragment in refusal(config.load, name)


def test_without_a_checkout_the_shipped_name_is_meant(tmp_path, monkeypatch):
    """As in an image that has the package alone, where configs/tiny.py is missing."""
    monkeypatch.chdir(tmp_path)
    for name in ("configs/tiny.py", "configs/tinny.py", "tinny"):
        assert f"--config {name}: there is no such file; did you mean 'tiny'?" in refusal(
            config.load, name
        )


@pytest.mark.parametrize(("sections", "fragment"), SAVED)
def test_saved(sections, fragment):
    assert fragment in refusal(config.from_dict, sections)
