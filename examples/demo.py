"""An MLA layer of DeepSeek-V3's dimensions, decoded from a paged cache and compared with the textbook.

Random weights; five requests of different lengths share a paged latent cache whose pages are shuffled. At
each step every request appends one token and attends to all of its own by ``ferromla.decode``, with the up
projections absorbed into queries and outputs. The textbook does not absorb anything and has no cache of
latents: it keeps full keys and values per head and computes in float64.

Attention runs on the first CUDA device where there is one (through torch), else on the CPU (numpy alone).
Exits with 1 when a step differs by more than 16-bit storage explains.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

import ferromla

HIDDEN, Q_LORA, HEADS = 7168, 1536, 128
LATENT, NOPE, ROPE, V = 512, 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5
PAGE_SIZE = 64
CONTEXTS = (5, 64, 133, 300, 700)
STEPS = 6
# Queries, latents and outputs are stored in 16 bits: each rounding is 2^-9 of a value at most in bfloat16.
LIMIT = 1e-2

Array = np.ndarray


class Device:
    """Where attention runs: numpy arrays on the CPU, or torch tensors on a GPU."""

    def __init__(self) -> None:
        self.torch = _torch_with_cuda()
        self.dtype = _bfloat16() if self.torch is None else None
        self.format = "fp16" if self.dtype is np.float16 else "bf16"
        self.name = "cpu" if self.torch is None else "cuda:0"

    def put(self, array: Array) -> Any:
        """Floats become the cache's 16-bit type; integers stay what they are."""
        floating = array.dtype.kind == "f"
        if self.torch is None:
            return array.astype(self.dtype) if floating else array
        tensor = self.torch.from_numpy(np.ascontiguousarray(array)).to(self.name)
        return tensor.to(self.torch.bfloat16) if floating else tensor

    def get(self, tensor: Any) -> Array:
        """Back to the host, as float32. Waits for the device."""
        return tensor.astype(np.float32) if self.torch is None else tensor.float().cpu().numpy()

    def cache(self, pages: int) -> Any:
        framework = "numpy" if self.torch is None else "torch"
        return ferromla.empty_kv_cache(pages, PAGE_SIZE, self.format, self.name, framework=framework)

    def synchronize(self) -> None:
        if self.torch is not None:
            self.torch.cuda.synchronize()


def _torch_with_cuda() -> Any:
    if ferromla.support()["backend"] != "cuda":
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _bfloat16() -> Any:
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        return np.float16
    return bfloat16


class Weights:
    """The layer's matrices, float32, each scaled by its fan-in."""

    def __init__(self, rng: np.random.Generator) -> None:
        def matrix(*shape: int, fan_in: int) -> Array:
            return rng.standard_normal(shape, dtype=np.float32) * np.float32(fan_in**-0.5)

        self.q_down = matrix(HIDDEN, Q_LORA, fan_in=HIDDEN)
        self.q_up = matrix(Q_LORA, HEADS * (NOPE + ROPE), fan_in=Q_LORA)
        self.kv_down = matrix(HIDDEN, LATENT + ROPE, fan_in=HIDDEN)
        self.k_up = matrix(HEADS, LATENT, NOPE, fan_in=LATENT)
        self.v_up = matrix(HEADS, LATENT, V, fan_in=LATENT)
        self.out = matrix(HEADS * V, HIDDEN, fan_in=HEADS * V)


def normalise(x: Array) -> Array:
    """RMS norm over the last axis, without a weight."""
    return x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-6)


def rotate(x: Array, position: Array) -> Array:
    """Rotary embedding of ``x [..., 64]``, pairs interleaved; ``position`` has x's leading axes."""
    frequency = 10000.0 ** (-np.arange(0, ROPE, 2) / ROPE)
    angle = position[..., None] * frequency
    cos, sin = np.cos(angle), np.sin(angle)
    even, odd = x[..., ::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape).astype(x.dtype)


class Layer:
    """The projections around attention, shared by both sides: what differs is attention itself."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def queries(self, x: Array, position: Array) -> tuple[Array, Array]:
        """``x [t, 7168]`` to ``(q_nope [t, 128, 128], q_pe [t, 128, 64])``."""
        q = normalise(x @ self.weights.q_down) @ self.weights.q_up
        q = q.reshape(len(x), HEADS, NOPE + ROPE)
        heads_position = np.broadcast_to(position[:, None], (len(x), HEADS))
        return q[..., :NOPE], rotate(q[..., NOPE:], heads_position)

    def latents(self, x: Array, position: Array) -> tuple[Array, Array]:
        """``x [t, 7168]`` to what the cache stores: ``(kv_c [t, 512], k_pe [t, 64])``."""
        kv = x @ self.weights.kv_down
        return normalise(kv[:, :LATENT]), rotate(kv[:, LATENT:], position)

    def output(self, heads: Array) -> Array:
        return heads.reshape(len(heads), HEADS * V).astype(np.float32) @ self.weights.out


class Paged:
    """Absorbed attention over the paged cache: ferromla's side."""

    def __init__(self, weights: Weights, device: Device, rng: np.random.Generator) -> None:
        self.weights, self.device = weights, device
        columns = -(-(max(CONTEXTS) + STEPS) // PAGE_SIZE)
        pages = rng.permutation(len(CONTEXTS) * columns + 3)[: len(CONTEXTS) * columns]
        self.table = pages.reshape(len(CONTEXTS), columns).astype(np.int32)
        self.cache = device.cache(len(CONTEXTS) * columns + 3)
        self.device_table = device.put(self.table)
        self.plan: ferromla.Plan | None = None

    def append(self, kv_c: Array, k_pe: Array, request: Array, position: Array) -> None:
        page = self.table[request, position // PAGE_SIZE].astype(np.int64)
        slots = page * PAGE_SIZE + position % PAGE_SIZE
        put = self.device.put
        ferromla.append_kv(put(kv_c), put(k_pe), self.cache, put(slots))

    def attend(self, q_nope: Array, q_pe: Array, lens: Array) -> tuple[Array, float]:
        """``[b, 128, 128]`` head outputs, and the seconds that decode took."""
        absorbed = np.einsum("bhn,hln->bhl", q_nope, self.weights.k_up, optimize=True)
        q = self.device.put(np.concatenate([absorbed, q_pe], -1)[:, None])
        seq_lens = self.device.put(lens.astype(np.int32))
        if self.plan is None:
            self.plan = ferromla.Plan(seq_lens, num_heads=HEADS, page_size=PAGE_SIZE)
        else:
            self.plan.update(seq_lens)
        self.device.synchronize()
        start = time.perf_counter()
        out, _ = ferromla.decode(q, self.cache, self.device_table, seq_lens, softmax_scale=SCALE, plan=self.plan)
        self.device.synchronize()
        seconds = time.perf_counter() - start
        latent = self.device.get(out)[:, 0]
        return np.einsum("bhl,hlv->bhv", latent, self.weights.v_up, optimize=True), seconds


class Textbook:
    """Full keys and values per head and request, float64."""

    def __init__(self, weights: Weights) -> None:
        self.k_up = weights.k_up.astype(np.float64)
        self.v_up = weights.v_up.astype(np.float64)
        self.keys: list[list[Array]] = [[] for _ in CONTEXTS]
        self.values: list[list[Array]] = [[] for _ in CONTEXTS]

    def append(self, kv_c: Array, k_pe: Array, request: Array) -> None:
        kv_c, k_pe = kv_c.astype(np.float64), k_pe.astype(np.float64)
        for r in np.unique(request):
            mine = request == r
            rope = np.broadcast_to(k_pe[mine], (HEADS, int(mine.sum()), ROPE))
            self.keys[r].append(np.concatenate([kv_c[mine] @ self.k_up, rope], -1))
            self.values[r].append(kv_c[mine] @ self.v_up)

    def attend(self, q_nope: Array, q_pe: Array) -> Array:
        """``[b, 128, 128]`` head outputs."""
        q = np.concatenate([q_nope, q_pe], -1).astype(np.float64)
        out = np.empty((len(q), HEADS, V))
        for r, query in enumerate(q):
            self.keys[r] = [np.concatenate(self.keys[r], 1)]
            self.values[r] = [np.concatenate(self.values[r], 1)]
            scores = (self.keys[r][0] @ query[..., None])[..., 0] * SCALE
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[r] = (weights[:, None] @ self.values[r][0])[:, 0]
        return out


def fill(layer: Layer, paged: Paged, textbook: Textbook, rng: np.random.Generator) -> None:
    """The contexts: appended to both sides in one shuffled batch."""
    request = np.repeat(np.arange(len(CONTEXTS)), CONTEXTS)
    position = np.concatenate([np.arange(length) for length in CONTEXTS])
    x = rng.standard_normal((len(request), HIDDEN), dtype=np.float32)
    kv_c, k_pe = layer.latents(x, position)
    textbook.append(kv_c, k_pe, request)
    shuffled = rng.permutation(len(request))
    paged.append(kv_c[shuffled], k_pe[shuffled], request[shuffled], position[shuffled])


def run_step(layer: Layer, paged: Paged, textbook: Textbook, x: Array, lens: Array) -> tuple[Array, dict]:
    """One token per request, ``lens`` before it. Gives the layer's output and the row of the table."""
    position, request = lens, np.arange(len(lens))
    q_nope, q_pe = layer.queries(x, position)
    kv_c, k_pe = layer.latents(x, position)
    paged.append(kv_c, k_pe, request, position)
    heads, seconds = paged.attend(q_nope, q_pe, lens + 1)
    start = time.perf_counter()
    textbook.append(kv_c, k_pe, request)
    want = textbook.attend(q_nope, q_pe)
    row = {
        "tokens": int((lens + 1).sum()),
        "decode ms": seconds * 1e3,
        "textbook ms": (time.perf_counter() - start) * 1e3,
        "max error": float(np.abs(heads - want).max()),
        "relative": float((np.linalg.norm(heads - want, axis=(1, 2)) / np.linalg.norm(want, axis=(1, 2))).max()),
    }
    return layer.output(heads), row


def main() -> int:
    """Run the demo; 0 when every step agrees."""
    start = time.perf_counter()
    device, rng = Device(), np.random.default_rng(0)
    report = ferromla.support(device.name)
    print(f"ferromla {ferromla.__version__}: backend {report['backend']}, {report['device_name'] or device.name}")
    if device.name == "cpu" and report["reason"] is None:
        print(f"no CUDA: {ferromla.support('cuda:0')['reason'] or 'torch with CUDA is not installed'}")
    print(f"MLA layer of {HEADS} heads, {len(CONTEXTS)} requests of {CONTEXTS} tokens, {device.format} cache")
    weights = Weights(rng)
    layer, paged, textbook = Layer(weights), Paged(weights, device, rng), Textbook(weights)
    fill(layer, paged, textbook, rng)
    x = rng.standard_normal((len(CONTEXTS), HIDDEN), dtype=np.float32)
    lens, worst = np.array(CONTEXTS), 0.0
    print(f"\n{'step':>4} {'tokens':>7} {'decode ms':>10} {'textbook ms':>12} {'max error':>10} {'relative':>10}")
    for step in range(STEPS):
        y, row = run_step(layer, paged, textbook, x, lens)
        x, lens = normalise(x + y), lens + 1
        worst = max(worst, row["relative"]) if np.isfinite(row["relative"]) else np.inf
        print(
            f"{step:>4} {row['tokens']:>7} {row['decode ms']:>10.3f} {row['textbook ms']:>12.1f} "
            f"{row['max error']:>10.2e} {row['relative']:>10.2e}"
        )
    agrees = worst <= LIMIT
    verdict = "agrees with" if agrees else "DIFFERS from"
    print(f"\n{verdict} float64 textbook attention: largest relative error {worst:.2e}, limit {LIMIT:.0e}")
    print(f"{time.perf_counter() - start:.1f} s in all")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
