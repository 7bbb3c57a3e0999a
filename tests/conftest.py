"""Eight virtual CPU devices and float64 for every test, set before JAX is imported.

Programs here run for milliseconds and compile for seconds, so LLVM optimises nothing: XLA's own
passes, and with them memory and collectives, are as always.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_ENABLE_X64"] = "1"
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
