#!/usr/bin/env bash
# All checks and timings for one GPU, in under eight minutes; appends JSON lines to
# tools/bench/results/gpu.jsonl. With --rehearse: the same parts, tiny, on a CPU.
# Needs the package's dependencies on PYTHONPATH or installed, except grain and array_record. In an
# image with JAX, Flax and Optax, usually the wheels of ml_collections and backports.zstd are
# missing. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# One process at a time has the GPU to itself.
export XLA_PYTHON_CLIENT_PREALLOCATE=true XLA_PYTHON_CLIENT_MEM_FRACTION=0.96
# Parts share autotuning results, so compile times after the first part are not cold ones.
found=$(mktemp -d)
export XLA_FLAGS="--xla_gpu_per_fusion_autotune_cache_dir=$found ${XLA_FLAGS:-}"
exec "${PYTHON:-python3}" tools/bench/gpu.py "$@"
