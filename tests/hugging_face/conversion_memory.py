"""Peak host memory of reading a checkpoint, and of writing it in bfloat16:
python -m tests.hugging_face.conversion_memory FOLDER FSDP.

Prints bytes: of the parameters (which are host memory too on a CPU), of the largest tensor, and of
both peaks beyond the parameters.
"""

import ctypes
import gc
import json
import pathlib
import sys
from typing import Any

import jax

from jaxscale.config import Config
from jaxscale.config.layout import Layout
from jaxscale.hugging_face.model_folder import (
    HuggingFaceModel,
    open_model,
    parameters_of,
    write_model,
)
from jaxscale.hugging_face.safetensors_format import lay_out
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import Engine, make_engine
from tests.hugging_face import tiny_llama

LARGE = {
    "hidden_size": 512,
    "intermediate_size": 16384,
    "num_hidden_layers": 5,
    "vocab_size": 65536,
    "head_dim": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
"""The embedding is the largest tensor, 134 MB, and less than each of three stacks, 168 MB. What the
allocator holds back, some MB, is little compared with them."""


def make_zeros(folder: pathlib.Path) -> None:
    """A large model of zeros, in files that take no disk space."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**tiny_llama.CONFIG, **LARGE}))
    lay_out(folder, {}, 1)
    engine = engine_of(folder, 1)
    rules = parameters_of(engine.config.model, engine.model.axes, engine.placement.canonical.params)
    shapes = {
        name: ("F32", one.rule.shape or one.rule.view) for one in rules for name in one.tensors
    }
    lay_out(folder, shapes, 10**12)


def engine_of(folder: pathlib.Path, fsdp: int) -> Engine:
    layout = Layout(data=1, fsdp=fsdp)
    config = Config(model=open_model(folder).config, layout=layout)
    return make_engine(config, make_mesh(layout, jax.devices()[:fsdp]))


def memory(name: str) -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def start_peak() -> int:
    """Resident bytes now; the peak is counted from here on."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # gives back what was freed
    begin = memory("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return begin


def write(model: HuggingFaceModel, engine: Engine, params: Any, output: pathlib.Path) -> None:
    write_model(
        output, model.config, engine.model.axes, params, dtype="bfloat16", workdir=model.directory
    )


def main() -> None:
    folder, fsdp = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    engine = engine_of(folder, fsdp)
    model = open_model(folder)
    wanted = engine.placement.canonical.params
    model.check(engine.model.axes, wanted)
    read_once = model.read(engine.model.axes, wanted)  # compiles
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(read_once)]
    del read_once
    begin = start_peak()
    params = jax.block_until_ready(model.read(engine.model.axes, wanted))
    read_peak = memory("VmHWM") - begin - sum(sizes)
    write(model, engine, params, folder / "compiles")
    begin = start_peak()
    write(model, engine, params, folder / "written")
    write_peak = memory("VmHWM") - begin
    print(
        json.dumps(
            {
                "params_bytes": sum(sizes),
                "largest_tensor_bytes": model.largest_tensor_bytes,
                "read_peak_bytes": read_peak,
                "write_peak_bytes": write_peak,
            }
        )
    )


if __name__ == "__main__":
    main()
