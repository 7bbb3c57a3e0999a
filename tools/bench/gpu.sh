#!/usr/bin/env bash
# Every check and every timing that one GPU allows, in one call of under eight minutes; appends
# JSON lines to tools/bench/results/gpu.jsonl. With --rehearse: the same parts, tiny, on a CPU.
# Needs the package's dependencies on PYTHONPATH or installed, but not grain and array_record; where
# an image has JAX, Flax and Optax, mostly the wheels of ml_collections and backports.zstd are to be
# carried. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# One process at a time has the GPU to itself.
export XLA_PYTHON_CLIENT_PREALLOCATE=true XLA_PYTHON_CLIENT_MEM_FRACTION=0.96
# What one part found of the fastest kernels serves the next: compile times, after the first part's,
# are not those of a machine that has compiled nothing.
found=$(mktemp -d)
export XLA_FLAGS="--xla_gpu_per_fusion_autotune_cache_dir=$found ${XLA_FLAGS:-}"
exec "${PYTHON:-python3}" tools/bench/gpu.py "$@"
