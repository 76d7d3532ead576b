from typing import Any, TypeAlias, TypedDict, overload

# A tensor of any framework: torch.Tensor, numpy.ndarray, cupy.ndarray, or anything that speaks DLPack.
Tensor: TypeAlias = Any
# One tensor, or its latent (512 wide) and rotary (64 wide) parts.
Parts: TypeAlias = Tensor | tuple[Tensor, Tensor]

__version__: str

class InvalidArgument(ValueError):  # noqa: N818
    argument: str
    value: str
    rule: str

class Unsupported(NotImplementedError):  # noqa: N818
    argument: str
    value: str
    rule: str

class CudaError(RuntimeError):
    call: str
    code: int
    message: str

class SupportedOperation(TypedDict):
    operation: str
    kv_format: str | None
    dtype: str
    d_qk: list[int]
    heads: str
    kv_heads: str
    page_sizes: str

class Support(TypedDict):
    device: str
    backend: str
    device_name: str | None
    kernels: list[str]
    compiler: str | None
    reason: str | None
    operations: list[SupportedOperation]

class Plan:
    def __new__(
        cls,
        seq_lens: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int = 1,
        q_len: int = 1,
        qo_indptr: Tensor | None = None,
        num_tokens: int | None = None,
        kv_format: str | None = None,
        page_size: int,
        causal: bool = True,
        num_splits: int | None = None,
        batch_invariant: bool = False,
        max_seq_len: int | None = None,
        max_q_len: int | None = None,
        num_sms: int | None = None,
        device: Any = None,
        workspace: Tensor | None = None,
    ) -> Plan: ...
    def update(self, seq_lens: Tensor, qo_indptr: Tensor | None = None) -> None: ...
    @staticmethod
    def sparse(
        topk_lengths: Tensor | None = None,
        extra_topk_lengths: Tensor | None = None,
        *,
        batch: int | None = None,
        num_heads: int,
        q_len: int = 1,
        topk: int,
        extra_topk: int = 0,
        kv_format: str | None = None,
        extra_kv_format: str | None = None,
        num_splits: int | None = None,
        batch_invariant: bool = False,
        num_sms: int | None = None,
        device: Any = None,
        workspace: Tensor | None = None,
    ) -> Plan: ...
    @staticmethod
    def sparse_prefill(
        topk_lengths: Tensor | None = None,
        *,
        num_tokens: int | None = None,
        num_heads: int,
        topk: int,
        kv_format: str | None = None,
        batch_invariant: bool = False,
        num_sms: int | None = None,
        device: Any = None,
        workspace: Tensor | None = None,
    ) -> Plan: ...
    def update_sparse(self, topk_lengths: Tensor | None = None, extra_topk_lengths: Tensor | None = None) -> None: ...
    @property
    def topk(self) -> int | None: ...
    @property
    def extra_topk(self) -> int | None: ...
    @property
    def batch(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def q_len(self) -> int | None: ...
    @property
    def num_tokens(self) -> int | None: ...
    @property
    def page_size(self) -> int | None: ...
    @property
    def device(self) -> str: ...
    @property
    def workspace(self) -> Tensor: ...
    @property
    def plan_bytes(self) -> int: ...
    @property
    def plan_offsets(self) -> tuple[int, int, int, int]: ...

def decode(
    q: Parts,
    kv_cache: Parts,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    kv_format: str | None = None,
    kv_scale: float | None = None,
    q_scale: float | Tensor | None = None,
    attn_sink: Tensor | None = None,
    plan: Plan | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    empty_lse: float | None = None,
) -> tuple[Tensor, Tensor]: ...
def prefill(
    q: Parts,
    kv_cache: Parts,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    kv_format: str | None = None,
    kv_scale: float | None = None,
    q_scale: float | Tensor | None = None,
    attn_sink: Tensor | None = None,
    plan: Plan | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    max_q_len: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    empty_lse: float | None = None,
) -> tuple[Tensor, Tensor]: ...
def sparse_decode(
    q: Parts,
    kv_cache: Parts,
    indices: Tensor,
    *,
    topk_lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_kv_cache: Parts | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_lengths: Tensor | None = None,
    kv_format: str | None = None,
    extra_kv_format: str | None = None,
    kv_scale: float | None = None,
    softmax_scale: float | None = None,
    plan: Plan | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    empty_lse: float | None = None,
) -> tuple[Tensor, Tensor]: ...
def sparse_prefill(
    q: Parts,
    kv: Parts,
    indices: Tensor,
    *,
    topk_lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    softmax_scale: float | None = None,
    kv_format: str | None = None,
    kv_scale: float | None = None,
    plan: Plan | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    max_logits: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    empty_lse: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
def workspace_bytes(
    *,
    batch: int,
    num_heads: int,
    num_kv_heads: int = 1,
    q_len: int = 1,
    num_tokens: int | None = None,
    kv_format: str | None = None,
    page_size: int | None = None,
    causal: bool = True,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    max_seq_len: int | None = None,
    max_q_len: int | None = None,
    topk: int | None = None,
    extra_topk: int = 0,
    extra_kv_format: str | None = None,
    num_sms: int | None = None,
    device: Any = None,
) -> int: ...
def append_kv(
    kv_c: Tensor,
    k_pe: Tensor | None,
    kv_cache: Parts,
    slots: Tensor,
    *,
    kv_format: str | None = None,
    kv_scale: float | None = None,
    round_scale: bool = True,
) -> None: ...
@overload
def gather_kv(
    cache: Parts,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    ids: None = None,
    kv_format: str | None = None,
    kv_scale: float | None = None,
    num_tokens: int | None = None,
    out: Tensor | None = None,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def gather_kv(
    cache: Parts,
    block_table: None = None,
    seq_lens: None = None,
    *,
    ids: Tensor,
    kv_format: str | None = None,
    kv_scale: float | None = None,
    num_tokens: int | None = None,
    out: Tensor | None = None,
    offsets: None = None,
) -> Tensor: ...
def to_physical(indices: Tensor, block_table: Tensor, page_size: int, *, out: Tensor | None = None) -> Tensor: ...
def window_token_ids(
    seq_lens: Tensor,
    query_lens: Tensor,
    block_table: Tensor,
    *,
    page_size: int,
    window: int,
    num_tokens: int | None = None,
    out: Tensor | None = None,
    offsets: Tensor | None = None,
    first_pos: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
def combine_topk_window(
    topk_indices: Tensor,
    positions: Tensor,
    request_ids: Tensor,
    *,
    ratio: int,
    window: int,
    compressed_base: Tensor,
    window_base: Tensor,
    first_pos: Tensor,
    pad_to: int = 128,
    out: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
def quantize_kv(
    kv: Tensor,
    kv_format: str,
    *,
    kv_scale: float | None = None,
    round_scale: bool = True,
    out: Tensor | None = None,
) -> Tensor: ...
def dequantize_kv(
    cache: Tensor,
    kv_format: str | None = None,
    *,
    kv_scale: float | None = None,
    out: Tensor | None = None,
    dtype: Any = None,
) -> Tensor: ...
def cache_shape(
    num_pages: int, page_size: int, kv_format: str, d_qk: int | None, device: Any
) -> tuple[list[int], list[int], str, str]: ...
def support(device: Any = None) -> Support: ...
