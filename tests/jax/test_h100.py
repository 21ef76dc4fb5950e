"""XLA compiles a training step of a layer for an H100, without a card: what it makes of the passes.

It needs JAX's plugin for CUDA, which no environment of this project has: `pip install --no-deps
jax-cuda12-plugin jax-cuda12-pjrt`, of the version of JAX.
"""

import re
from pathlib import Path

import pytest
from processes import python

pytest.importorskip("jax_cuda12_plugin")

PROGRAM = """
    from gpu import CARDS  # before JAX, as Triton reads TRITON_INTERPRET

    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    import anycell.jax as aj
    from anycell import cells
    from anycell.engines.gpu import launch
    from anycell.jax import device
    from anycell.layer.card import TracedDevice

    H100 = '''
    gpu_device_info {
      threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
      fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
      block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
      clock_rate_ghz: 1.98 device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
      cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
      registers_per_block_limit: 65536 driver_version: "12.8.0"
      compile_time_toolkit_version: "12.9.0"
    }
    platform_name: "CUDA"
    dnn_version_info { major: 9 minor: 8 }
    runtime_version { major: 12 minor: 8 patch: 0 }
    device_description_str: "NVIDIA H100 80GB HBM3"
    '''
    launch.missing = lambda: None
    TracedDevice.limits = CARDS["H100"]
    device.doubt = lambda tier: None
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology="1x1x1"
    )
    sharding = SingleDeviceSharding(topology.devices[0])

    def shaped(tree):
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16, sharding=sharding), tree
        )

    def loss(params, x):
        return layer(params, x, engine="gpu")[0].astype(jnp.float32).sum()

    layer = aj.RNN(cells.LSTM, 768, 768)
    params = jax.eval_shape(layer.init, jax.eval_shape(lambda: jax.random.key(0)))
    x = jax.ShapeDtypeStruct((128, 16, 768), jnp.bfloat16)
    jax.jit(jax.value_and_grad(loss)).lower(shaped(params), shaped(x)).compile()
"""


@pytest.mark.slow
def test_a_training_step(tmp_path: Path) -> None:
    """It is at most 12 thunks, and no copy is between the passes: none of what is kept."""
    flags = f"--xla_gpu_autotune_level=0 --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    environment = {"XLA_FLAGS": flags, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    python(PROGRAM, JAX_PLATFORMS=None, JAX_DISABLE_MOST_OPTIMIZATIONS=None,
           TRITON_INTERPRET="1", **environment)  # fmt: skip
    (file,) = tmp_path.glob("*jit_loss.thunk_sequence.txt")
    thunks = re.findall(r"^\d+: (\w+)", file.read_text(), re.MULTILINE)
    passes = [n for n, kind in enumerate(thunks) if kind == "kCustomCall"]
    assert len(thunks) <= 12 and len(passes) == 2, thunks
    assert "kCopy" not in thunks[passes[0] : passes[1]]
