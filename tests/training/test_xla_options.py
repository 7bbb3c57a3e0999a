"""Options of the step: those of the device, without what this XLA does not know."""

import logging
import re

import jax
import pytest

from jaxscale.compiled import topology
from jaxscale.config import from_dict
from jaxscale.config.layout import Layout
from jaxscale.hardware import GPU_MEMORY_VARIABLES
from jaxscale.sharding.layer_bytes import LayerBytes
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training import engine, xla_options
from jaxscale.training.engine import make_engine
from jaxscale.training.xla_options import step_options, waits_for_gathers

pytestmark = pytest.mark.compiles

KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def test_a_cpu_needs_none():
    assert step_options(make_mesh(Layout(data=8), jax.devices())) == {}


def test_an_option_that_this_xla_does_not_know_is_left_out_and_logged(monkeypatch, caplog):
    known = xla_options.XlaFlag("xla_cpu_enable_fast_math", False, "an option that there is")
    unknown = xla_options.XlaFlag("xla_cpu_no_such_option", True, "to see it refused")
    monkeypatch.setitem(xla_options.XLA_FLAGS, "cpu", (unknown, known))
    monkeypatch.setattr(logging.getLogger("jaxscale"), "propagate", True)
    mesh = make_mesh(Layout(data=8), jax.devices())
    assert step_options(mesh) == {"xla_cpu_enable_fast_math": False}
    assert "xla_cpu_no_such_option" in caplog.text


@pytest.mark.parametrize(
    ("name", "waits"),
    [("v4:2x2x1", True), ("v5e:2x2", True), ("v5p:2x2x1", False), ("v6e:2x2", False)],
)
def test_v4_and_v5e_wait_for_gathers(name, waits):
    (kind,) = {device.device_kind for device in topology.open_topology(name).devices}
    assert waits_for_gathers(kind) == waits


def deterministic_engine():
    config = from_dict({"layout": {"data": 8}, "run": {"deterministic": True}})
    return make_engine(config, make_mesh(config.layout, jax.devices()))


def test_determinism_is_set_or_refused_and_never_left_out(monkeypatch):
    mesh = make_mesh(Layout(data=8), jax.devices())
    assert step_options(mesh, deterministic=True) == {}  # CPUs are
    deterministic_engine()
    known = xla_options.XlaFlag("xla_cpu_enable_fast_math", False, "an option that there is")
    monkeypatch.setitem(xla_options.DETERMINISTIC, "cpu", (known,))
    assert step_options(mesh) == {}
    assert step_options(mesh, deterministic=True) == {"xla_cpu_enable_fast_math": False}
    unknown = xla_options.XlaFlag("xla_cpu_no_such_option", True, "to see it refused")
    monkeypatch.setitem(xla_options.DETERMINISTIC, "cpu", (known, unknown))
    with pytest.raises(ValueError, match="does not know xla_cpu_no_such_option, without which"):
        deterministic_engine()
    monkeypatch.delitem(xla_options.DETERMINISTIC, "cpu")
    with pytest.raises(ValueError, match=r"not for the cpu back end; set run.deterministic = F"):
        deterministic_engine()


def test_absent_gpus_cannot_be_compiled_for_deterministically():
    if not topology.compiler_installed("gpu"):
        pytest.skip("no compiler for GPUs: uv sync --inexact --extra aot")
    mesh = make_mesh(Layout(data=1, fsdp=4), topology.open_topology("h200:1x4").devices)
    assert "xla_gpu_deterministic_ops" not in step_options(mesh)
    with pytest.raises(ValueError, match=r"compile with run\.deterministic = False"):
        step_options(mesh, deterministic=True)


# Of stage 3, before 0.12, XLA also computes memory addresses of W's copies on the host. What stays
# there of it is a limit of XLA, and by hand.
@pytest.mark.proof
@pytest.mark.parametrize(
    ("zero_stage", "on_host"),
    [
        (1, 1),
        pytest.param(3, 4 if jax.__version_info__ >= (0, 12) else 6, marks=pytest.mark.slow),
    ],
)
def test_on_gpus_the_operations_of_a_tick_wait_for_no_host(zero_stage, on_host, tmp_path):
    """The loops of a pipeline are in CUDA graphs, whose conditions the device reads, but those with
    a collective in them: over the ticks, whose number XLA knows, and from stage 2 on B, and in it
    the head and the embedding, whose gradients are reduce-scattered."""
    if not topology.compiler_installed("gpu"):
        pytest.skip("no compiler for GPUs: uv sync --inexact --extra aot")
    config = from_dict(
        {
            "model": {"num_layers": 4, "d_model": 128, "num_heads": 1, "num_kv_heads": 1}
            | {"head_dim": 128, "d_ff": 256, "vocab_size": 256, "attention": "reference"},
            "data": {"global_batch_size": 8, "seq_len": 64},
            "layout": {"data": 1, "pipeline": 2, "fsdp": 2, "microbatches": 4, "remat": "full"}
            | {"zero_stage": zero_stage},
        }
    )
    mesh = make_mesh(config.layout, topology.open_topology("h200:1x4").devices)
    engine = make_engine(config, mesh)
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    engine.step.lower(engine.abstract_state, engine.abstract_batch).compile(compiler_options=dump)
    (thunks,) = tmp_path.glob("*.thunk_sequence_after_thunk_passes.txt")
    loops = loops_in_graphs(thunks.read_text())
    assert len(loops) == 12
    assert loops.count(False) == on_host


def loops_in_graphs(thunks: str) -> list[bool]:
    """Of each loop and conditional, whether a CUDA graph has it, from XLA's indented list of what
    the host executes."""
    found, around = [], []
    for indent, kind in re.findall(r"^( *)\d+: k(\w+)", thunks, re.MULTILINE):
        around = [(depth, name) for depth, name in around if depth < len(indent)]
        if kind in ("While", "Conditional"):
            found.append(any(name == "CommandBuffer" for _, name in around))
        around.append((len(indent), kind))
    return found


def test_what_the_environment_says_of_cuda_graphs_wins(monkeypatch):
    if not topology.compiler_installed("gpu"):
        pytest.skip("no compiler for GPUs: uv sync --inexact --extra aot")
    mesh = make_mesh(Layout(data=1, fsdp=4), topology.open_topology("h200:1x4").devices)
    assert "xla_gpu_enable_command_buffer" not in step_options(mesh)
    assert "WHILE" in str(step_options(mesh, pipelined=True)["xla_gpu_enable_command_buffer"])
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert "xla_gpu_enable_command_buffer" not in step_options(mesh, pipelined=True)


def test_the_collectives_of_a_large_layer_are_combined_on_gpus(monkeypatch):
    large, small = LayerBytes(gathered=437 * 10**6, reduced=109 * 10**6), LayerBytes(10**6, 10**6)
    assert step_options(make_mesh(Layout(data=8), jax.devices()), layer=large) == {}
    if not topology.compiler_installed("gpu"):
        pytest.skip("no compiler for GPUs: uv sync --inexact --extra aot")
    mesh = make_mesh(Layout(data=1, fsdp=4), topology.open_topology("h200:1x4").devices)
    always = step_options(mesh)
    names = [f"xla_gpu_{kind}_combine_threshold_bytes" for kind in KINDS]
    combined = dict(zip(names, (large.gathered, large.reduced, large.reduced)))
    assert step_options(mesh, layer=large) == always | combined
    assert step_options(mesh, layer=small) == always
    # Without a gather whole gradients are all-reduced.
    added = step_options(mesh, layer=LayerBytes(0, large.reduced)).keys() - always.keys()
    assert added == {*names[1:], "xla_disable_hlo_passes"}
    monkeypatch.setenv("XLA_FLAGS", f"--{names[0]}=1000")
    assert names[0] not in step_options(mesh, layer=large)


def test_matmuls_of_float8_are_left_to_cublas(monkeypatch):
    name = "xla_gpu_enable_triton_gemm"
    cpu = make_mesh(Layout(data=8), jax.devices())
    assert step_options(cpu, matmul_dtype="float8") == {}
    if not topology.compiler_installed("gpu"):
        pytest.skip("no compiler for GPUs: uv sync --inexact --extra aot")
    mesh = make_mesh(Layout(data=1, fsdp=4), topology.open_topology("h200:1x4").devices)
    assert name not in step_options(mesh)
    assert step_options(mesh, matmul_dtype="float8") == step_options(mesh) | {name: False}
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=true")
    assert name not in step_options(mesh, matmul_dtype="float8")


def test_xla_plans_with_the_memory_that_jax_takes_of_a_gpu(monkeypatch):
    if not topology.compiler_installed("gpu"):
        pytest.skip("no compiler for GPUs: uv sync --inexact --extra aot")
    name = "xla_gpu_memory_limit_slop_factor"
    for variable in GPU_MEMORY_VARIABLES:  # which commands set
        monkeypatch.delenv(variable, raising=False)
    mesh = make_mesh(Layout(data=1, fsdp=4), topology.open_topology("h200:1x4").devices)
    assert step_options(mesh)[name] == 112  # % of 80 %: just below the 90 % of an absent GPU
    half = 0.5 * 150.1e9
    assert step_options(mesh, arguments=half)[name] == 133  # of 30 %: just below 40 %
    assert step_options(mesh, arguments=1.7 * half)[name] == 112  # XLA has no limit then
    assert name not in step_options(make_mesh(Layout(data=8), jax.devices()))
    with monkeypatch.context() as context:
        context.setenv("XLA_CLIENT_MEM_FRACTION", "0.45")
        assert step_options(mesh)[name] == 56
        half = topology.open_topology("h200:1x4").limit_bytes
        context.setenv("XLA_CLIENT_MEM_FRACTION", "90%")
        with pytest.raises(ValueError, match="XLA_CLIENT_MEM_FRACTION = '90%' in the environment"):
            topology.open_topology("h200:1x4")
    assert topology.open_topology("h200:1x4").limit_bytes == pytest.approx(2 * half)
    monkeypatch.setattr(jax, "devices", lambda: list(mesh.devices.flat))
    assert step_options(mesh)[name] == 93  # of the 75 % that JAX takes unless told
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.95")
    assert step_options(mesh)[name] == 118
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=95")
    assert name not in step_options(mesh)


def test_a_step_is_compiled_with_the_bytes_of_its_state(monkeypatch):
    given = {}
    monkeypatch.setattr(engine, "step_options", lambda mesh, **known: given.update(known) or {})
    config = from_dict({"layout": {"data": 8, "zero_stage": 0}, "data": {"global_batch_size": 8}})
    made = engine.make_engine(config, make_mesh(config.layout, jax.devices()))
    state = jax.tree.leaves(made.abstract_state)  # whole on each device
    assert given["arguments"] == sum(leaf.size * leaf.dtype.itemsize for leaf in state)


def test_what_the_environment_says_of_the_initial_parameters_program_wins(monkeypatch):
    name = "xla_backend_optimization_level"
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    assert xla_options.init_options("cpu") == {name: 1}
    assert xla_options.init_options("gpu") == {}
    monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_enable_fast_math=false --{name}=0")
    assert xla_options.init_options("cpu") == {}


def test_an_option_with_a_wrong_value_is_an_error(monkeypatch):
    wrong = xla_options.XlaFlag("xla_backend_optimization_level", True, "a number, not a truth")
    monkeypatch.setitem(xla_options.XLA_FLAGS, "cpu", (wrong,))
    with pytest.raises(RuntimeError, match="xla_backend_optimization_level of xla_options"):
        step_options(make_mesh(Layout(data=8), jax.devices()))


def test_this_xla_takes_the_flags_for_gpus():
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert xla_options.refused_options(xla_options.XLA_FLAGS["gpu"], one) == {}


def test_every_flag_has_a_reason():
    tables = (*xla_options.XLA_FLAGS.values(), *xla_options.DETERMINISTIC.values())
    others = (xla_options.PIPELINED, xla_options.FLOAT8, xla_options.IN_PLACE, xla_options.INIT)
    for flags in (*tables, *others):
        assert all(flag.name.startswith("xla_") and len(flag.reason) > 20 for flag in flags)
