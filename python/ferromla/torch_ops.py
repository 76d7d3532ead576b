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
_LISTS = "Tensor? topk_lengths=None, Tensor? attn_sink=None"
_SPARSE_INPUTS = "Tensor q, Tensor kv_cache, Tensor indices"
_SPARSE_OPTIONS = (
    f"{_LISTS}, Tensor? extra_kv_cache=None, Tensor? extra_indices=None, Tensor? extra_topk_lengths=None, "
    "str? kv_format=None, str? extra_kv_format=None, float? softmax_scale=None, int? num_splits=None, "
    "bool batch_invariant=False, float? empty_lse=None, float? kv_scale=None"
)
_SPARSE_PREFILL_INPUTS = "Tensor q, Tensor kv, Tensor indices"
_SPARSE_PREFILL_OUTPUTS = "Tensor(a!) out, Tensor(b!) max_logits, Tensor(c!) lse"
_SPARSE_PREFILL_OPTIONS = (
    f"{_LISTS}, float? softmax_scale=None, str? kv_format=None, bool batch_invariant=False, "
    "float? empty_lse=None, float? kv_scale=None"
)
_STATES = "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b"
_ROWS = "Tensor kv_c, Tensor? k_pe, Tensor(a!) kv_cache, Tensor slots"
_ROWS_OPTIONS = "str? kv_format=None, float? kv_scale=None, bool round_scale=True"


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


# By name: the schema, the function that takes the schema's arguments by name, and what stands for it in a trace.
_OPERATORS = {
    "decode": (f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)", ferromla.decode, _fake_attention),
    "decode_out": (f"({_INPUTS}, {_OUTPUTS}, {_OPTIONS}) -> ()", ferromla.decode, _fake_nothing),
    "prefill": (
        f"({_INPUTS}, Tensor qo_indptr, {_OPTIONS}) -> (Tensor, Tensor)",
        ferromla.prefill,
        _fake_attention,
    ),
    "prefill_out": (
        f"({_INPUTS}, Tensor qo_indptr, {_OUTPUTS}, {_OPTIONS}) -> ()",
        ferromla.prefill,
        _fake_nothing,
    ),
    "sparse_decode": (
        f"({_SPARSE_INPUTS}, {_SPARSE_OPTIONS}) -> (Tensor, Tensor)",
        ferromla.sparse_decode,
        _fake_attention,
    ),
    "sparse_decode_out": (
        f"({_SPARSE_INPUTS}, {_OUTPUTS}, {_SPARSE_OPTIONS}) -> ()",
        ferromla.sparse_decode,
        _fake_nothing,
    ),
    "sparse_prefill": (
        f"({_SPARSE_PREFILL_INPUTS}, {_SPARSE_PREFILL_OPTIONS}) -> (Tensor, Tensor, Tensor)",
        ferromla.sparse_prefill,
        _fake_sparse_prefill,
    ),
    "sparse_prefill_out": (
        f"({_SPARSE_PREFILL_INPUTS}, {_SPARSE_PREFILL_OUTPUTS}, {_SPARSE_PREFILL_OPTIONS}) -> ()",
        ferromla.sparse_prefill,
        _fake_nothing,
    ),
    "merge_states": (f"({_STATES}) -> (Tensor, Tensor)", ferromla.merge_states, _fake_merge_states),
    "merge_states_out": (f"({_STATES}, {_OUTPUTS}) -> ()", ferromla.merge_states, _fake_nothing),
    "append_kv": (f"({_ROWS}, {_ROWS_OPTIONS}) -> ()", ferromla.append_kv, _fake_nothing),
}

_library = torch.library.Library("ferromla", "DEF")


def _implementation(name, function):
    """The function as torch calls it: by position, without the last arguments where they are the schema's defaults."""
    schema = getattr(torch.ops.ferromla, name).default._schema
    names = [argument.name for argument in schema.arguments]

    def call(*values):
        results = function(**dict(zip(names, values, strict=False)))
        return results if schema.returns else None

    return call


def _register() -> None:
    for name, (schema, function, fake) in _OPERATORS.items():
        _library.define(name + schema)
        implementation = _implementation(name, function)
        for key in ("CPU", "CUDA"):
            _library.impl(name, implementation, key)
        torch.library.register_fake(f"ferromla::{name}", fake, lib=_library)


_register()
