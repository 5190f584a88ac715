"""GPUs as XLA's compiler describes them, for planning without one.

The figures are those of XLA's own descriptions (xla/backends/gpu/target_config/specs).
"""

# Options of the compiler. It would time programs on the device to choose among them.
COMPILER_OPTIONS = {'xla_gpu_autotune_level': 0, 'xla_gpu_enable_triton_gemm': False}

_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  cuda_compute_capability {{ major: 9 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""
_NAMES = {'h100': 'NVIDIA H100 80GB HBM3', 'h200': 'NVIDIA H200 141GB HBM3e'}


def describe(version: str, memory: int, bandwidth: float) -> str:
  """Returns the compiler's description of a GPU, such as 'h100', as text.

  `memory` is in bytes, and `bandwidth` in bytes per second.
  """
  return _DESCRIPTION.format(
    name=_NAMES[version], memory=memory, bandwidth=round(bandwidth)
  )
