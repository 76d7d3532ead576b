"""FlashMLA's interface: programs written for ``flash_mla`` run on ferromla's kernels, and on its CPU backend.

``import ferromla.compat.flash_mla as flash_mla``, or, where the import cannot be changed, ``install()`` before it. The
functions are those of FlashMLA's versions of 2026, whose ``get_mla_metadata`` needs no arguments, as the first call
with its result makes the schedule. They take what FlashMLA takes on Hopper and give what it gives. Beyond that they
take any page size and number of query heads, float16, sparse attention over 16-bit caches, and dense attention over
``fp8`` and V3.2 ones.

Needs torch.

Example:
    >>> import torch, ferromla.compat.flash_mla as flash_mla
    >>> q, cache = torch.zeros(2, 1, 16, 576).half(), torch.ones(4, 64, 1, 576).half()
    >>> table, lens = torch.tensor([[1, 0], [3, 2]]).int(), torch.tensor([100, 0]).int()
    >>> metadata, num_splits = flash_mla.get_mla_metadata()
    >>> out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, lens, 512, metadata, num_splits)
    >>> tuple(out.shape), tuple(lse.shape), round(lse[0, 0, 0].exp().item()), lse[1, 0, 0].item()
    ((2, 1, 16, 512), (2, 16, 1), 100, inf)
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch

import ferromla
from ferromla._errors import error

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "install",
]

# Of caches of bytes: what a token of so many is.
_FORMATS = {656: "fp8_v32", 584: "fp8_v4", 528: "fp8_v41", 288: "fp4_v41", 576: "fp8", 512: "fp8"}
_D_V = 512
_EMPTY_LSE = float("inf")  # what FlashMLA has for rows that see no key


class FlashMLASchedMeta:
    """The schedule of a step: a ``ferromla.Plan``, which the first call with it makes; None before.

    It serves later calls with the same shapes, ``cache_seqlens``, ``topk_length`` and ``extra_topk_length``, those of
    the other layers say. Made in the capture of a CUDA graph it is the graph's, and made anew by each replay.
    One that was made before has to live as long as the graph, and keeps its lengths.
    """

    plan: ferromla.Plan | None = None


def get_mla_metadata(*_args: Any, **_options: Any) -> tuple[FlashMLASchedMeta, None]:
    """Metadata for the calls of one step, without a schedule yet. Arguments, of earlier versions, are left aside.

    Returns:
        The metadata, and None in the place of ``num_splits``.

    Example:
        >>> import ferromla.compat.flash_mla as flash_mla
        >>> metadata, num_splits = flash_mla.get_mla_metadata()
        >>> metadata.plan is num_splits is None
        True
    """
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a few query tokens of each request over its pages, or, with ``indices``, over listed tokens.

    Args:
        q: ``[b, s_q, heads, d_qk]``, bfloat16 or float16; ``d_qk`` 576 or 512.
        k_cache: ``[pages, page_size, kv_heads, d_qk]`` in the dtype of ``q``, or, with ``is_fp8_kvcache``,
            ``[pages, page_size, 1, bytes]`` uint8, int8 or float8_e4m3fn: 656 (V3.2, ``fp8_v32``), 584 (V4,
            ``fp8_v4``), 528 (V4.1 with scales in the row, ``fp8_v41``) or, without scales in the cache, ``d_qk``
            (``fp8``).
        block_table: ``[b, columns]`` int32; of dense attention only.
        cache_seqlens: ``[b]`` int32, tokens of each request with the new ones; of dense attention only.
        head_dim_v: 512.
        tile_scheduler_metadata: of ``get_mla_metadata``.
        num_splits: None.
        softmax_scale: None for ``d_qk ** -0.5``.
        causal: of dense attention only.
        indices: ``[b, s_q, topk]`` int32, ``page * page_size + offset``; what is not in the cache is absent.
        attn_sink: ``[heads]`` float32: ``out`` is multiplied by ``exp(lse) / (exp(lse) + exp(attn_sink))``; ``lse`` is
            without it.
        extra_k_cache: a second cache, with a page size of its own, whose tokens join the same softmax:
            ``[pages, page_size, 1, d_qk]`` or ``[pages, page_size, 1, bytes]`` as ``k_cache``, where a token may also
            have 288 bytes (V4.1, ``fp4_v41``).
        extra_indices_in_kvcache: ``[b, s_q, extra_topk]`` int32, as ``indices``, into ``extra_k_cache``.
        topk_length, extra_topk_length: ``[b]`` int32: the entries of a list that count, the first ones.

    Returns:
        ``out [b, s_q, heads, 512]`` in the dtype of ``q``, and ``lse [b, heads, s_q]`` float32, the natural logarithm,
        ``+inf`` for rows that see no key, where ``ferromla.decode`` has ``-inf``.

    Raises:
        InvalidArgument, Unsupported: before anything is launched.

    Example:
        >>> import torch, ferromla.compat.flash_mla as flash_mla
        >>> q, cache = torch.zeros(1, 1, 16, 576).half(), torch.ones(4, 64, 1, 576).half()
        >>> lists = {"indices": torch.tensor([[[70, 3, -1, 200]]]).int(), "attn_sink": torch.full((16,), 3.0).log()}
        >>> metadata, num_splits = flash_mla.get_mla_metadata()
        >>> out, lse = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, metadata, num_splits, **lists)
        >>> out[0, 0, 0, 0].item(), round(lse[0, 0, 0].exp().item())
        (0.5, 3)
    """
    _check_d_v("head_dim_v", head_dim_v)
    metadata = tile_scheduler_metadata
    if not isinstance(metadata, FlashMLASchedMeta):
        rule = "must be what get_mla_metadata() of this module returned, a FlashMLASchedMeta"
        raise error(ferromla.InvalidArgument, "tile_scheduler_metadata", f"of type {type(metadata).__name__}", rule)
    _must_be_none("num_splits", num_splits, "must be None, as get_mla_metadata() returned it")
    options = {"softmax_scale": softmax_scale, "attn_sink": attn_sink, "empty_lse": _EMPTY_LSE}
    options["kv_format"] = _format_of("k_cache", k_cache) if is_fp8_kvcache else None
    lists = {
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "topk_length": topk_length,
        "extra_topk_length": extra_topk_length,
    }
    if indices is not None:
        _must_be_none("causal", causal or None, "must be False with indices, which say what is seen")
        lists["extra_kv_format"] = None
        if is_fp8_kvcache and extra_k_cache is not None:
            lists["extra_kv_format"] = _format_of("extra_k_cache", extra_k_cache)
        out, lse = _attend_lists(metadata, q, k_cache, indices, options, **lists)
    else:
        for name, given in lists.items():
            _must_be_none(name, given, "must be None without indices: dense attention has no lists")
        for name, given in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
            if given is None:
                raise error(ferromla.InvalidArgument, name, "None", "must be given without indices")
        out, lse = _attend_pages(metadata, q, k_cache, block_table, cache_seqlens, {"causal": causal, **options})
    return out, lse.transpose(1, 2)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = _D_V,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    indexer_topk: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Attention of many query tokens, each over listed rows of ``kv``.

    Args:
        q: ``[s_q, heads, d_qk]``, bfloat16 or float16; ``d_qk`` 576 or 512.
        kv: ``[s_kv, 1, d_qk]``, in the dtype of ``q``.
        indices: ``[s_q, 1, topk]`` int32; what is no row of ``kv`` is absent.
        sm_scale: what scores are multiplied with.
        d_v: 512.
        attn_sink: ``[heads]`` float32: ``out`` is multiplied by ``exp(lse) / (exp(lse) + exp(attn_sink))``; ``lse`` is
            without it.
        topk_length: ``[s_q]`` int32: the entries of a list that count, the first ones.
        indexer_topk: if not 0, the ``lse`` over so many first entries is returned as well, by a second pass over them.

    Returns:
        ``out [s_q, heads, 512]``, ``max_logits [s_q, heads]`` and ``lse [s_q, heads]`` float32, the natural logarithm;
        0, ``-inf`` and ``+inf`` for rows that see no key. With ``indexer_topk`` a fourth, as ``lse``.

    Raises:
        InvalidArgument, Unsupported: before anything is launched.

    Example:
        >>> import torch, ferromla.compat.flash_mla as flash_mla
        >>> q, kv = torch.zeros(3, 16, 576).half(), torch.ones(50, 1, 576).half()
        >>> indices = torch.arange(40).int().expand(3, 1, 40)
        >>> out, max_logits, lse, of_ten = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1, indexer_topk=10)
        >>> round(lse[0, 0].exp().item()), round(of_ten[0, 0].exp().item()), max_logits[0, 0].item()
        (40, 10, 0.0)
    """
    _check_d_v("d_v", d_v)
    if not 0 <= indexer_topk <= indices.shape[-1]:
        rule = f"must be from 0 to {indices.shape[-1]}, the entries of indices"
        raise error(ferromla.InvalidArgument, "indexer_topk", str(indexer_topk), rule)

    def attend(indices: torch.Tensor, lengths: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        options = {"attn_sink": attn_sink, "softmax_scale": sm_scale, "empty_lse": _EMPTY_LSE}
        return ferromla.sparse_prefill(q, kv, indices, topk_lengths=lengths, **options)

    results = attend(indices, topk_length)
    if indexer_topk == 0:
        return results
    # Lengths past the end of a list count all of it.
    return *results, attend(indices[..., :indexer_topk], topk_length)[2]


def _no_keys_and_values(*_args: Any, **_options: Any) -> NoReturn:
    """Attention over keys and values of heads, which FlashMLA has for sm_100 only.

    Raises:
        Unsupported: always.

    Example:
        >>> import ferromla, ferromla.compat.flash_mla as flash_mla
        >>> try:
        ...     flash_mla.flash_attn_varlen_func()
        ... except ferromla.Unsupported as refused:
        ...     refused.value
        'flash_attn_varlen'
    """
    rule = "FlashMLA has it for sm_100 only; on Hopper FlashAttention-3 has attention over keys and values of heads"
    raise error(ferromla.Unsupported, "operation", "flash_attn_varlen", rule)


flash_attn_varlen_func = flash_attn_varlen_kvpacked_func = flash_attn_varlen_qkvpacked_func = _no_keys_and_values


def install(name: str = "flash_mla") -> None:
    """Makes imports of ``flash_mla`` and of ``flash_mla.flash_mla_interface`` from here on be this module.

    Args:
        name: the package's, if a program has it elsewhere.

    Example:
        >>> import ferromla.compat.flash_mla
        >>> ferromla.compat.flash_mla.install()
        >>> from flash_mla import flash_mla_with_kvcache
        >>> flash_mla_with_kvcache.__module__
        'ferromla.compat.flash_mla'
    """
    module = sys.modules[__name__]
    module.flash_mla_interface = module  # for `import flash_mla.flash_mla_interface as ...`
    sys.modules[name] = sys.modules[f"{name}.flash_mla_interface"] = module


def _attend_pages(
    metadata: FlashMLASchedMeta,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = metadata.plan
    if plan is None:
        _check_axes(q=(q, 4), k_cache=(k_cache, 4), block_table=(block_table, 2))
        page_size = k_cache.shape[1]
        plan = ferromla.Plan(
            cache_seqlens,
            num_heads=q.shape[2],
            num_kv_heads=k_cache.shape[2],
            q_len=q.shape[1],
            kv_format=options["kv_format"],
            page_size=page_size,
            causal=options["causal"],
            max_seq_len=block_table.shape[1] * page_size,
        )
    results = ferromla.decode(q, k_cache, block_table, cache_seqlens, plan=plan, **options)
    metadata.plan = plan  # a call that is refused leaves none
    return results


def _attend_lists(
    metadata: FlashMLASchedMeta,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    options: dict[str, Any],
    *,
    extra_k_cache: torch.Tensor | None,
    extra_indices_in_kvcache: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    extra_kv_format: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = metadata.plan
    if plan is None:
        _check_axes(q=(q, 4), indices=(indices, 3), extra_indices_in_kvcache=(extra_indices_in_kvcache, 3))
        extra_indices = extra_indices_in_kvcache
        plan = ferromla.Plan.sparse(
            topk_length,
            extra_topk_length,
            batch=q.shape[0],
            num_heads=q.shape[2],
            q_len=q.shape[1],
            topk=indices.shape[-1],
            extra_topk=0 if extra_indices is None else extra_indices.shape[-1],
            kv_format=options["kv_format"],
            extra_kv_format=extra_kv_format,
            device=q.device,
        )
    results = ferromla.sparse_decode(
        q,
        k_cache,
        indices,
        topk_lengths=topk_length,
        extra_kv_cache=extra_k_cache,
        extra_indices=extra_indices_in_kvcache,
        extra_topk_lengths=extra_topk_length,
        extra_kv_format=extra_kv_format,
        plan=plan,
        **options,
    )
    metadata.plan = plan  # as above
    return results


def _format_of(name: str, cache: torch.Tensor) -> str:
    width = cache.shape[-1]
    if width not in _FORMATS:
        rule = f"must have {', '.join(map(str, _FORMATS))} bytes per token where caches are fp8"
        raise error(ferromla.Unsupported, name, f"{width} wide", rule)
    return _FORMATS[width]


def _check_axes(**given: tuple[torch.Tensor | None, int]) -> None:
    """Of what a plan's shapes are taken from; calls check the rest."""
    for name, (tensor, axes) in given.items():
        if tensor is not None and tensor.ndim != axes:
            raise error(ferromla.InvalidArgument, name, f"of shape {list(tensor.shape)}", f"must have {axes} axes")


def _check_d_v(name: str, d_v: int) -> None:
    if d_v != _D_V:
        raise error(ferromla.Unsupported, name, str(d_v), f"must be {_D_V}")


def _must_be_none(name: str, given: Any, rule: str) -> None:
    if given is not None:
        value = str(given) if isinstance(given, bool) else f"of type {type(given).__name__}"
        raise error(ferromla.InvalidArgument, name, value, rule)
