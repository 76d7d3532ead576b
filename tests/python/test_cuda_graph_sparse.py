"""Captured graphs of sparse calls: the layers of a model, replayed while lists, lengths and pages change."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import ferromla
import graphs
import problems
import problems_sparse
import tolerance

pytestmark = pytest.mark.gpu

TOPK, EXTRA_TOPK = 700, 130
# (kv_format, extra_kv_format, d_qk)
FORMATS = [("fp8_v32", None, 576), ("fp8_v4", "fp8_v4", 512), ("fp8_v4", "bf16", 512), ("bf16", None, 576)]
# What topk_lengths and extra_topk_lengths of four requests are, one after another: they grow past the list and the next
# multiple of 64, some become empty, all do, and they come back.
STEPS = [
    ([3, 64, 200, 0], [1, 130, 0, 64]),
    ([4, 65, 201, 1], [2, 131, 1, 65]),
    ([TOPK, 128, 0, TOPK + 9], [EXTRA_TOPK, 0, 0, 3]),
    ([0, 0, 0, 0], [0, -3, 0, 0]),
    ([0, 0, 700, 0], [0, 77, 0, 0]),
    ([699, 333, 65, 12], [9, 70, 130, 128]),
]
PLANNING = ["captured", "between replays", "by each call"]


def _clean(keys, kv_format) -> problems_sparse.Keys:
    """The same lists over a cache of the format without a NaN."""
    cache, numbers = keys.cache.nan_to_num(0.5), None
    if kv_format != "bf16":
        cache = ferromla.quantize_kv(cache, kv_format)
        numbers = ferromla.dequantize_kv(cache, kv_format, dtype=torch.float32)
    return problems_sparse.Keys(cache, keys.indices, keys.lens, kv_format, numbers)


class Layers:
    """Several sparse decodes with caches, lists and outputs of their own, and the lengths that they share."""

    def __init__(self, formats, h, device) -> None:
        main, extra, d_qk = formats
        self.lens, self.extra_lens = (torch.full((4, 2), 50, dtype=torch.int32, device=device) for _ in range(2))
        self.layers = [self._layer(main, extra, d_qk, h, device, seed) for seed in range(3)]
        self.caches = [keys for layer in self.layers for keys in (layer.main, layer.extra) if keys]
        self.whole = [keys.cache.clone() for keys in self.caches]
        self.outputs = [problems.poisoned_outputs(layer.q) for layer in self.layers]
        self.drawn = problems.drawing(11, device)

    def _layer(self, main, extra, d_qk, h, device, seed):
        sizes = None if extra is None else (300, EXTRA_TOPK, 16)
        shape = {"s_k": 900, "topk": TOPK, "page": 64, "extra": sizes, "d_qk": d_qk}
        layer = problems_sparse.decode(4, 2, h, **shape, device=device, seed=seed)
        layer.main = _clean(dataclasses.replace(layer.main, lens=self.lens), main)
        layer.extra = None if extra is None else _clean(dataclasses.replace(layer.extra, lens=self.extra_lens), extra)
        return layer

    def run(self, plan) -> None:
        """All layers into their outputs."""
        for layer, (out, lse) in zip(self.layers, self.outputs, strict=True):
            layer.run(plan=plan, out=out, lse=lse)

    def update(self, plan, device=None) -> None:
        """The plan for the lengths as they are now, from copies on another device if one is named."""
        lens = [self.lens] if self.layers[0].extra is None else [self.lens, self.extra_lens]
        plan.update_sparse(*(x.to(device or x.device) for x in lens))

    def change(self, lens, extra_lens) -> None:
        """Other lengths and lists, in place; the two query tokens of a request differ. What no list has is NaN."""
        difference = torch.tensor([0, -1], dtype=torch.int32, device=self.lens.device)
        for there, given in ((self.lens, lens), (self.extra_lens, extra_lens)):
            there.copy_(torch.tensor(given, dtype=torch.int32, device=there.device)[:, None] + difference)
        for keys, whole in zip(self.caches, self.whole, strict=True):
            tokens = keys.cache.shape[0] * keys.cache.shape[1]
            keys.indices.copy_(problems_sparse.random_indices(keys.indices.shape, tokens, self.drawn))
            keys.cache.copy_(whole)
            keys.poison() if keys.kv_format == "bf16" else keys.spoil()

    def move_pages(self) -> None:
        """Every page goes to another place, with all that is in it, and the lists say where."""
        for keys, whole in zip(self.caches, self.whole, strict=True):
            pages, page_size = keys.cache.shape[:2]
            place = torch.arange(pages, device=whole.device).roll(3)
            for tensor in (keys.cache, keys.numbers, whole):
                if tensor is not None:
                    tensor[place] = tensor.clone()
            there = (keys.indices >= 0) & (keys.indices < pages * page_size)
            page, offset = torch.where(there, keys.indices, 0).long() // page_size, keys.indices % page_size
            keys.indices.copy_(torch.where(there, place[page] * page_size + offset, keys.indices))

    def results(self):
        """What the outputs hold, which are poisoned again."""
        torch.cuda.synchronize()
        held = [(out.clone(), lse.clone()) for out, lse in self.outputs]
        for out, lse in self.outputs:
            out.fill_(problems.NAN)
            lse.fill_(problems.NAN)
        return held

    def check(self, results) -> None:
        """Against the lists, lengths and caches as they are now."""
        for layer, got in zip(self.layers, results, strict=True):
            tolerance.check(*got, *layer.expected())


@pytest.mark.parametrize("h", [16, 32, 64])
@pytest.mark.parametrize("planning", PLANNING)
@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_layers_replay_for_other_lists_lengths_and_pages(cuda, formats, planning, h):
    layers = Layers(formats, h, cuda)
    plan = None if planning == "by each call" else layers.layers[0].plan()

    def run():
        if planning == "captured":
            layers.update(plan)
        layers.run(plan)

    graph = graphs.captured(run)
    layers.results()
    for step, lens in enumerate(STEPS):
        layers.change(*lens)
        if planning == "between replays":
            layers.update(plan, "cpu" if step % 2 else None)
        graph.replay()
        before = layers.results()
        layers.check(before)
        layers.move_pages()
        graph.replay()
        after = layers.results()
        same = [torch.equal(a, b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True)]
        assert all(same), "the same tokens elsewhere give other bits"


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_v32"])
@pytest.mark.parametrize(("t", "h", "topk"), [(70, 64, 300), (62, 64, 2500), (9, 16, 2500), (3, 128, 2500)])
def test_a_sparse_prefill_replays_for_other_lists_and_lengths(cuda, kv_format, t, h, topk):
    """Lists of few tokens are split: the highest scores of the replay before must not stay."""
    problem = problems_sparse.prefill(t=t, h=h, s_kv=400, page=64, topk=topk, lens="row", device=cuda)
    keys = problem.keys = _clean(problem.keys, kv_format)
    tokens = keys.cache.shape[0] * keys.cache.shape[1]
    out, lse = problems.poisoned_outputs(problem.q)
    outputs = {"out": out, "max_logits": torch.empty_like(lse), "lse": lse}
    graph = graphs.captured(lambda: problem.run(**outputs))
    drawn = problems.drawing(5, cuda)
    for most in (5, 64, topk + 10, 0):
        keys.indices.copy_(problems_sparse.random_indices(keys.indices.shape, tokens, drawn))
        keys.lens.copy_(torch.randint(-2, most + 1, keys.lens.shape, dtype=torch.int32, **drawn))
        for output in outputs.values():
            output.fill_(float("inf"))
        graph.replay()
        found = tolerance.prefill_faults(*outputs.values(), *problem.expected())
        assert not found, "\n".join(found)
