"""What a random problem of the soak is, as plain data drawn from a seed and a number."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


@dataclass(frozen=True)
class Limits:
    """How large a problem may be: what one costs is then a millisecond or so on the device."""

    work: int  # padded query rows of all requests, times keys and what a row costs without any
    tokens: int  # of the cache, times its heads
    longest: int  # sequence


GPU = Limits(work=2 << 20, tokens=24 << 10, longest=6000)
CPU = Limits(work=100 << 10, tokens=6 << 10, longest=1500)
EMULATED = Limits(work=400 << 10, tokens=12 << 10, longest=3000)
ROW_KEYS = 100  # a row costs as much as so many keys of it: the result has 512 numbers


class FieldPerLine:
    """A dataclass that is printed a field a line."""

    def __str__(self) -> str:
        return "\n".join(f"  {field.name} = {getattr(self, field.name)!r}" for field in fields(self))


@dataclass(frozen=True)
class Spec(FieldPerLine):
    """One problem. ``seq_lens`` are what the call gets: some are more than the table holds, or negative."""

    seed: int
    index: int
    operation: str  # decode or prefill
    dtype: str
    d_qk: int
    kv_heads: int
    group: int
    page_size: int
    columns: int  # of the block table
    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    unowned: int  # query tokens after those of the last request
    causal: bool
    softmax_scale: float | None
    sink: str | None  # finite, or infinite ones among them
    num_splits: int | None
    batch_invariant: bool
    planning: str  # by the call, or by a plan from device lengths, from host lengths, or updated to these
    q_layout: str
    cache_layout: str
    wide_out: bool
    strided_table: bool
    kv_head_axis: bool  # also where there is one cached head
    absent_pages: tuple[tuple[int, int, int], ...]  # (request, column, page id)
    garbage: float  # in cache slots that no request owns
    repeat: bool  # a second call gives the same bits
    kv_format: str | None = None  # a quantised one, else the cache is of dtype
    kv_scale: float | None = None
    q_scale: str | None = None  # queries in e4m3 with one scale, or with one for each row
    slope: float = 0.0  # how much higher scores get from key to key
    num_sms: int | None = None  # of a plan
    empty_lse: float | None = None  # lse of rows that see no key

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def capacity(self) -> int:
        """Tokens that a row of the block table can hold."""
        return self.columns * self.page_size

    @property
    def clamped(self) -> list[int]:
        """The lengths that count."""
        return [min(max(length, 0), self.capacity) for length in self.seq_lens]


def draw(seed: int, index: int, limits: Limits) -> Spec:
    """Problem ``index`` of the soak ``seed``: the same one every time."""
    rng = random.Random(f"{seed}/{index}")
    operation = rng.choice(("decode", "prefill"))
    kv_heads = rng.choice((1, 1, 1, 1, 1, 1, 2, 3))
    page_size = rng.choice((1, 2, 3, 8, 16, 32, 61, 64, 64, 64, 100, 128, 256))
    batch, longest, most_queries, group = _sizes(rng, operation, kv_heads, page_size, limits)
    q_lens, unowned = _query_lens(rng, operation, batch, most_queries)
    seq_lens, columns = _seq_lens(rng, batch, longest, page_size)
    num_splits = rng.choice((None,) * 14 + (1, 2, 3, 5, 8, 40))
    d_qk = rng.choice((576, 576, 576, 512))
    layouts = ("whole", "whole", "wide rows", "wide second axis", *(("parts",) if d_qk == 576 else ()))
    spec = Spec(
        seed=seed,
        index=index,
        operation=operation,
        dtype=rng.choice(("bfloat16", "float16")),
        d_qk=d_qk,
        kv_heads=kv_heads,
        group=group,
        page_size=page_size,
        columns=columns,
        seq_lens=seq_lens,
        q_lens=q_lens,
        unowned=unowned,
        causal=rng.random() < 0.7,
        softmax_scale=None if rng.random() < 0.7 else rng.uniform(0.005, 0.04),
        sink=rng.choice((None,) * 7 + ("finite", "finite", "infinite")),
        num_splits=num_splits,
        batch_invariant=rng.random() < 0.2,
        planning=rng.choice(("call", "call", "device", "host", "updated")),
        q_layout=rng.choice(layouts),
        cache_layout=rng.choice(layouts),
        wide_out=rng.random() < 0.3,
        strided_table=rng.random() < 0.2,
        kv_head_axis=kv_heads > 1 or rng.random() < 0.3,
        absent_pages=_absent_pages(rng, batch, columns),
        garbage=rng.choice((float("nan"), float("nan"), float("inf"), float("-inf"))),
        repeat=rng.random() < 0.1,
        slope=draw_slope(seed, index, d_qk),
        num_sms=draw_num_sms(seed, index),
        empty_lse=draw_empty_lse(seed, index),
    )
    return _quantised(rng, spec) if kv_heads == 1 and rng.random() < 0.4 else spec


def draw_empty_lse(seed: int, index: int) -> float | None:
    """What lse is to be for rows that see no key: mostly what it is by default."""
    rng = random.Random(f"{seed}/{index}/empty_lse")
    return rng.choice((None, None, None, float("inf"), 7.5))


def draw_slope(seed: int, index: int, d_qk: int) -> float:
    """Of scores that rise or fall, some by so much that the softmax of what was seen before is scaled down again and
    again. It is the rope part that makes them: values stay as they are."""
    rng = random.Random(f"{seed}/{index}/slope")
    return rng.choice((-1, 1, 1)) * rng.uniform(0.01, 0.1) if d_qk == 576 and rng.random() < 0.3 else 0.0


def draw_num_sms(seed: int, index: int) -> int | None:
    """Of some plans: those of smaller GPUs among them."""
    rng = random.Random(f"{seed}/{index}/num_sms")
    return rng.choice((8, 78, 114, rng.randint(8, 140))) if rng.random() < 0.3 else None


def _quantised(rng: random.Random, spec: Spec) -> Spec:
    """The same problem over a quantised cache, which is one tensor."""
    kv_format = rng.choice(("fp8", "fp8_v32")) if spec.d_qk == 576 else "fp8"
    fp8 = kv_format == "fp8"
    layout = "whole" if spec.cache_layout == "parts" else spec.cache_layout
    return replace(
        spec,
        kv_format=kv_format,
        kv_scale=rng.choice((None, 0.01)) if fp8 else None,
        q_scale=rng.choice((None, "one", "rows")) if fp8 else None,
        cache_layout=layout,
        q_layout="whole" if spec.q_layout == "parts" and fp8 else spec.q_layout,
    )


def _sizes(rng: random.Random, operation: str, kv_heads: int, page_size: int, limits: Limits):
    """Requests, longest sequence, most query tokens of a request, query heads per cached head."""
    batch = rng.choice((0,) + (1,) * 20 + tuple(range(2, 10)) * 6 + (17, 33, 64, 90, 150, 230))
    bound = rng.choice((3, 70, 70, 300, 300, 300, 1500, 6000))
    longest = rng.randint(0, min(bound, limits.longest))
    most_queries = rng.choice((1, 1, 1, 2, 3, 4, 7, 16, 33))
    if operation == "prefill":
        most_queries = rng.choice((1, 2, 4, 9, 40, 130, 300))
    group = rng.choice((1, 2, 3, 5, 8, 9, 16, 16, 16, 32, 33, 63, 64, 65, 100, 128, 128))
    while batch * (longest + ROW_KEYS) * most_queries * group * kv_heads > limits.work:
        sizes = {"batch": batch, "longest": longest, "queries": most_queries, "group": group}
        halved = rng.choice([name for name, size in sizes.items() if size > 1])
        sizes[halved] //= 2
        batch, longest, most_queries, group = sizes.values()
    while batch * (longest + 3 * page_size) * kv_heads > limits.tokens and batch > 1:
        batch //= 2
    return batch, longest, most_queries, group


def _query_lens(rng: random.Random, operation: str, batch: int, most: int) -> tuple[tuple[int, ...], int]:
    """The query tokens of each request, and those of none."""
    if operation == "decode":
        return (most,) * batch, 0
    kind = rng.choice(("any", "any", "few and many", "even"))
    if kind == "even":
        q_lens = (most,) * batch
    elif kind == "any":
        q_lens = tuple(rng.randint(0, most) for _ in range(batch))
    else:
        q_lens = tuple(rng.choice((0, 1, 1, 1, most)) for _ in range(batch))
    return q_lens, rng.choice((0,) * 8 + (1, 5))


def _seq_lens(rng: random.Random, batch: int, longest: int, page_size: int) -> tuple[tuple[int, ...], int]:
    """Lengths, and the columns of a table that holds them; now and then one that it does not hold."""
    kind = rng.choice(("any", "any", "even", "some empty"))
    lens = [longest if kind == "even" else rng.randint(0, longest) for _ in range(batch)]
    if kind == "some empty" and batch > 1:
        lens = [rng.choice((0, length)) for length in lens]
    columns = -(-max([0, *lens]) // page_size) + rng.randint(0, 2)
    if batch and rng.random() < 0.1:
        capacity = columns * page_size
        lens[rng.randrange(batch)] = rng.choice((-1, INT_MIN, capacity, capacity + 1, INT_MAX))
    return tuple(lens), columns


def _absent_pages(rng: random.Random, batch: int, columns: int) -> tuple[tuple[int, int, int], ...]:
    """Entries of the table that name no page."""
    if not batch or not columns or rng.random() < 0.9:
        return ()
    bad = (-1, INT_MIN, INT_MAX, 2147480000)
    return tuple((rng.randrange(batch), rng.randrange(columns), rng.choice(bad)) for _ in range(rng.randint(1, 3)))
