"""``torch.ops.ferromla``: the operations as torch operators, for ``torch.compile`` and export.

Importing this module registers them (it imports torch; ``import ferromla`` alone does not). The out-variants
write to the caller's tensors; the attentions and ``merge_states`` allocate their results. A
``ferromla.Plan`` is no tensor and does not pass through an operator: call ``ferromla.decode`` or
``ferromla.prefill`` directly to use one.

Example:
    >>> import torch, ferromla.torch_ops
    >>> q, cache = torch.zeros(1, 1, 16, 576).half(), torch.ones(2, 64, 576).half()
    >>> table, lens = torch.tensor([[1, 0]]).int(), torch.tensor([100]).int()
    >>> out, lse = torch.ops.ferromla.decode(q, cache, table, lens)
    >>> tuple(out.shape), round(lse[0, 0, 0].exp().item())
    ((1, 1, 16, 512), 100)
"""

from __future__ import annotations

import torch

import ferromla

__all__: list[str] = []

_INPUTS = "Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens"
_OUTPUTS = "Tensor(a!) out, Tensor(b!) lse"
_OPTIONS = (
    "float? softmax_scale=None, bool causal=True, Tensor? attn_sink=None, int? num_splits=None, "
    "bool batch_invariant=False, str? kv_format=None, float? kv_scale=None, Tensor? q_scale=None, "
    "float? empty_lse=None"
)
# Their names: torch passes an operator's arguments by position, without the last ones where they are defaults.
_OPTION_NAMES = (
    "softmax_scale",
    "causal",
    "attn_sink",
    "num_splits",
    "batch_invariant",
    "kv_format",
    "kv_scale",
    "q_scale",
    "empty_lse",
)
_LISTS = "Tensor? topk_lengths=None, Tensor? attn_sink=None, "
_SPARSE_OPTIONS = (
    _LISTS + "Tensor? extra_kv_cache=None, Tensor? extra_indices=None, Tensor? extra_topk_lengths=None, "
    "str? kv_format=None, str? extra_kv_format=None, float? softmax_scale=None, int? num_splits=None, "
    "bool batch_invariant=False, float? empty_lse=None"
)
_SPARSE_NAMES = (
    "topk_lengths",
    "attn_sink",
    "extra_kv_cache",
    "extra_indices",
    "extra_topk_lengths",
    "kv_format",
    "extra_kv_format",
    "softmax_scale",
    "num_splits",
    "batch_invariant",
    "empty_lse",
)
_SPARSE_PREFILL_OPTIONS = (
    _LISTS + "float? softmax_scale=None, str? kv_format=None, bool batch_invariant=False, float? empty_lse=None"
)
_SPARSE_PREFILL_NAMES = ("topk_lengths", "attn_sink", "softmax_scale", "kv_format", "batch_invariant", "empty_lse")
_SPARSE_PREFILL_OUTPUTS = "Tensor(a!) out, Tensor(b!) max_logits, Tensor(c!) lse"
_SCHEMAS = (
    f"decode({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)",
    f"decode_out({_INPUTS}, {_OUTPUTS}, {_OPTIONS}) -> ()",
    f"prefill({_INPUTS}, Tensor qo_indptr, {_OPTIONS}) -> (Tensor, Tensor)",
    f"prefill_out({_INPUTS}, Tensor qo_indptr, {_OUTPUTS}, {_OPTIONS}) -> ()",
    f"sparse_decode(Tensor q, Tensor kv_cache, Tensor indices, {_SPARSE_OPTIONS}) -> (Tensor, Tensor)",
    f"sparse_decode_out(Tensor q, Tensor kv_cache, Tensor indices, {_OUTPUTS}, {_SPARSE_OPTIONS}) -> ()",
    f"sparse_prefill(Tensor q, Tensor kv, Tensor indices, {_SPARSE_PREFILL_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    f"sparse_prefill_out(Tensor q, Tensor kv, Tensor indices, {_SPARSE_PREFILL_OUTPUTS}, {_SPARSE_PREFILL_OPTIONS}) "
    "-> ()",
    "merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    "merge_states_out(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor(a!) out, Tensor(b!) lse) -> ()",
    "append_kv(Tensor kv_c, Tensor? k_pe, Tensor(a!) kv_cache, Tensor slots, str? kv_format=None, "
    "float? kv_scale=None, bool round_scale=True) -> ()",
)

_library = torch.library.Library("ferromla", "DEF")


def _decode(q, kv_cache, block_table, seq_lens, *options):
    return ferromla.decode(q, kv_cache, block_table, seq_lens, **_named(options))


def _decode_out(q, kv_cache, block_table, seq_lens, out, lse, *options):
    ferromla.decode(q, kv_cache, block_table, seq_lens, out=out, lse=lse, **_named(options))


def _prefill(q, kv_cache, block_table, seq_lens, qo_indptr, *options):
    return ferromla.prefill(q, kv_cache, block_table, seq_lens, qo_indptr, **_named(options))


def _prefill_out(q, kv_cache, block_table, seq_lens, qo_indptr, out, lse, *options):
    ferromla.prefill(q, kv_cache, block_table, seq_lens, qo_indptr, out=out, lse=lse, **_named(options))


def _sparse_decode(q, kv_cache, indices, *options):
    return ferromla.sparse_decode(q, kv_cache, indices, **_named(options, _SPARSE_NAMES))


def _sparse_decode_out(q, kv_cache, indices, out, lse, *options):
    ferromla.sparse_decode(q, kv_cache, indices, out=out, lse=lse, **_named(options, _SPARSE_NAMES))


def _sparse_prefill(q, kv, indices, *options):
    return ferromla.sparse_prefill(q, kv, indices, **_named(options, _SPARSE_PREFILL_NAMES))


def _sparse_prefill_out(q, kv, indices, out, max_logits, lse, *options):
    named = _named(options, _SPARSE_PREFILL_NAMES)
    ferromla.sparse_prefill(q, kv, indices, out=out, max_logits=max_logits, lse=lse, **named)


def _named(options, names=_OPTION_NAMES):
    return dict(zip(names, options, strict=False))


def _merge_states(out_a, lse_a, out_b, lse_b):
    return ferromla.merge_states(out_a, lse_a, out_b, lse_b)


def _merge_states_out(out_a, lse_a, out_b, lse_b, out, lse):
    ferromla.merge_states(out_a, lse_a, out_b, lse_b, out=out, lse=lse)


def _append_kv(kv_c, k_pe, kv_cache, slots, kv_format=None, kv_scale=None, round_scale=True):
    ferromla.append_kv(kv_c, k_pe, kv_cache, slots, kv_format=kv_format, kv_scale=kv_scale, round_scale=round_scale)


def _fake_attention(q, *_args, **_options):
    shape = q.shape[:-1]
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    return q.new_empty((*shape, 512), dtype=dtype), q.new_empty(shape, dtype=torch.float32)


def _fake_sparse_prefill(q, *_args, **_options):
    out, lse = _fake_attention(q)
    return out, torch.empty_like(lse), lse


def _fake_merge_states(out_a, lse_a, _out_b, _lse_b):
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _fake_nothing(*_args, **_options):
    return None


def _register() -> None:
    implementations = (
        (_decode, _fake_attention),
        (_decode_out, _fake_nothing),
        (_prefill, _fake_attention),
        (_prefill_out, _fake_nothing),
        (_sparse_decode, _fake_attention),
        (_sparse_decode_out, _fake_nothing),
        (_sparse_prefill, _fake_sparse_prefill),
        (_sparse_prefill_out, _fake_nothing),
        (_merge_states, _fake_merge_states),
        (_merge_states_out, _fake_nothing),
        (_append_kv, _fake_nothing),
    )
    for schema, (implementation, fake) in zip(_SCHEMAS, implementations, strict=True):
        name = schema.partition("(")[0]
        _library.define(schema)
        for key in ("CPU", "CUDA"):
            _library.impl(name, implementation, key)
        torch.library.register_fake(f"ferromla::{name}", fake, lib=_library)


_register()
