"""Multi-head latent attention (MLA) over a paged KV cache, on NVIDIA Hopper GPUs and on CPUs.

Every function takes tensors of any framework that speaks DLPack (torch, numpy and cupy are tested), runs on
the device they are on, and returns tensors of the caller's kind. ``help(ferromla.decode)`` says the rest.
"""

from ferromla._cache import empty_kv_cache
from ferromla._ferromla import (
    CudaError,
    InvalidArgument,
    Plan,
    Unsupported,
    __version__,
    append_kv,
    combine_topk_window,
    decode,
    dequantize_kv,
    gather_kv,
    merge_states,
    prefill,
    quantize_kv,
    sparse_decode,
    sparse_prefill,
    support,
    to_physical,
    window_token_ids,
    workspace_bytes,
)

__all__ = [
    "CudaError",
    "InvalidArgument",
    "Plan",
    "Unsupported",
    "__version__",
    "append_kv",
    "combine_topk_window",
    "decode",
    "dequantize_kv",
    "empty_kv_cache",
    "gather_kv",
    "merge_states",
    "prefill",
    "quantize_kv",
    "sparse_decode",
    "sparse_prefill",
    "support",
    "to_physical",
    "window_token_ids",
    "workspace_bytes",
]
