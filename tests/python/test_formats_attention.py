"""decode and prefill over quantised caches, against float64 over the dequantised values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ferromla
import ferromla.torch_ops
import problems
import problems_formats
import reference_formats as formats
import tolerance

FORMS = {f"{form.name}-{form.d_qk}": form for form in formats.FORMATS if form.name in ("fp8", "fp8_v32")}
E4M3 = torch.float8_e4m3fn
KV_SCALE = 0.003
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def _quantise(problem, form, page_size, *, round_scale=True, kv_scale=KV_SCALE, dtype=torch.uint8):
    """The problem over a cache of the format, with NaN in every byte that no token owns."""
    b, s, _, d = problem.keys.shape
    options = {"kv_scale": kv_scale} if form.scale is None else {"round_scale": round_scale}
    tokens = formats.quantise(problem.keys.reshape(-1, d), form, **options)
    cache, problem.table = problems_formats.page(tokens, form, s, problem.lens, page_size=page_size)
    options.pop("round_scale", None)
    problem.cache = cache.view(dtype)
    problem.keys = formats.dequantise(tokens, form, **options).view(b, s, 1, d)
    problem.options |= {"kv_format": form.name, **options}
    return problem


def _problem(form, page_size=64, quantisation=None, **shape):
    problem = problems.make(d_qk=form.d_qk, page_size=page_size, **shape)
    return _quantise(problem, form, page_size, **(quantisation or {}))


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size", [1, 61, 64])
@pytest.mark.parametrize(("h", "s_q"), [(1, 1), (16, 2), (20, 1), (128, 1), (64, 4)])
def test_decode(device, form, dtype, page_size, h, s_q):
    _problem(form, page_size, b=4, h=h, s_q=s_q, seq=300, dtype=dtype, device=device).check()


@each_form
@pytest.mark.parametrize("h", [16, 32, 64])
@pytest.mark.parametrize("page_size", [8, 24, 32, 96, 128])
def test_pages_of_whole_boxes(device, form, page_size, h):
    """Pages of rows in multiples of eight; lengths that end within a box, with it, and with the page."""
    lens = [300, 0, 1, 8, page_size, 2 * page_size + 8, 129]
    _problem(form, page_size, h=h, lens=lens, device=device).check()


@each_form
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page_size", [16, 61])
def test_prefill(device, form, causal, page_size):
    lens, q_lens = [200, 0, 70, 130], [40, 3, 0, 65]
    _problem(form, page_size, h=16, lens=lens, q_lens=q_lens, device=device, causal=causal).check()


@pytest.mark.parametrize("q_lens", [None, [5, 0, 2]])
def test_raw_scales(device, q_lens):
    """Caches that others wrote hold any float32 scale, not only powers of two."""
    form = FORMS["fp8_v32-576"]
    _problem(form, h=16, lens=[300, 0, 64], q_lens=q_lens, device=device, quantisation={"round_scale": False}).check()


@pytest.mark.parametrize("dtype", [torch.int8, E4M3, torch.uint8], ids=str)
@each_form
def test_bytes_of_every_name(device, form, dtype):
    problem = _problem(form, h=16, seq=100, device=device, quantisation={"dtype": dtype})
    problem.check()
    problem.cache = problem.cache.unsqueeze(2)
    problem.check()
    if form.scale is None and dtype == E4M3:
        problem.check(kv_format=None)


@each_form
def test_options(device, form):
    problem = _problem(form, b=3, s_q=2, h=16, seq=700, device=device)
    sink = torch.linspace(-2, 2, 16, device=device)
    problem.check(attn_sink=sink, softmax_scale=0.05, num_splits=3, causal=False)
    alone = problem.check(batch_invariant=True)
    again = problem.check(batch_invariant=True)
    assert torch.equal(alone[0], again[0])
    plan = ferromla.Plan(problem.lens, num_heads=16, q_len=2, page_size=64, kv_format=form.name)
    problem.check(plan=plan)
    other = ferromla.Plan(problem.lens, num_heads=16, q_len=2, page_size=64, kv_format="bf16")
    with pytest.raises(ferromla.InvalidArgument, match="made for kv_format bf16") as caught:
        problem.run(plan=other)
    assert caught.value.argument == "plan"


@each_form
@pytest.mark.parametrize("h", [16, 17, 32, 33])
def test_plans_for_the_format_and_for_any(device, form, h):
    """Rows of a CTA depend on the format; a plan for any does for every one."""
    problem = _problem(form, b=2, h=h, seq=300, device=device)
    want = problem.check()
    shapes = {"num_heads": h, "page_size": 64, "max_seq_len": 64 * problem.table.shape[1]}
    got = problem.run(plan=ferromla.Plan(problem.lens, kv_format=form.name, **shapes))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    problem.check(plan=ferromla.Plan(problem.lens, **shapes))  # other parts, it may be


@each_form
def test_strided_pages_and_two_part_queries(device, form):
    problem = _problem(form, 16, b=3, h=16, seq=200, device=device)
    n, page_size, _ = problem.cache.shape
    wide = torch.full((n, page_size + 3, form.bytes + 16), 0xFF, dtype=torch.uint8, device=device)
    wide[:, :page_size, : form.bytes] = problem.cache
    problem.cache = wide[:, :page_size, : form.bytes]
    want = problem.check()
    if form.d_qk == 576:
        q = problem.q
        out, lse = problems.poisoned_outputs(q)
        parts = q[..., :512].contiguous(), q[..., 512:].contiguous()
        ferromla.decode(parts, problem.cache, problem.table, problem.lens, **problem.options, out=out, lse=lse)
        assert torch.equal(out, want[0])
        assert torch.equal(lse, want[1])


def _e4m3_queries(problem, scale):
    """The problem's queries as codes, and what they stand for."""
    scale = torch.as_tensor(scale, dtype=torch.float32, device=problem.q.device)[..., None]
    codes = (problem.q.float() / scale).clamp(-448, 448).to(E4M3)
    return codes, codes.float() * scale


def _check_e4m3(problem, numbers, **options):
    """Runs by the kernels that few short requests go to, and by those of their rows, and compares with the numbers that
    the queries stand for; gives the first result."""
    want = replace(problem, q=numbers).expected(**problem.options)
    results = [problem.call(**problem.options, **options, num_splits=splits) for splits in (None, 2)]
    for out, lse in results:
        assert out.dtype == torch.bfloat16
        tolerance.check(out, lse, *want)
    return results[0]


@pytest.mark.parametrize("name", ["fp8-576", "fp8-512"])
@pytest.mark.parametrize("kind", ["none", "float", "rows", "strided rows"])
@pytest.mark.parametrize("q_lens", [None, [4, 0, 7]], ids=["decode", "prefill"])
def test_e4m3_queries(device, name, kind, q_lens):
    problem = _problem(FORMS[name], h=16, s_q=2, lens=[300, 5, 64], q_lens=q_lens, device=device)
    rows = torch.linspace(0.02, 0.3, problem.q[..., 0].numel(), device=device).view(problem.q.shape[:-1])
    if kind == "strided rows":
        rows = torch.stack([rows, rows * problems.NAN], -1)[..., 0]
    scale = {"none": 1.0, "float": 0.07}.get(kind, rows)
    codes, numbers = _e4m3_queries(problem, scale)
    options = {} if kind == "none" else {"q_scale": scale}
    problem.q = codes
    out, _ = _check_e4m3(problem, numbers, **options)
    given = torch.full_like(out, problems.NAN)
    assert problem.call(**problem.options, **options, out=given)[0] is given
    assert torch.equal(given, out)


@pytest.mark.parametrize("page_size", [64, 5])
@pytest.mark.parametrize("h", [16, 32, 64, 128])
@pytest.mark.parametrize("q_lens", [None, [4, 0, 7]], ids=["decode", "prefill"])
def test_e4m3_queries_of_no_scale(device, page_size, h, q_lens):
    """What queries of zeros may have, as padding does: all scores are 0, masked keys still do not count."""
    problem = _problem(FORMS["fp8-576"], page_size, h=h, s_q=2, lens=[300, 5, 64], q_lens=q_lens, device=device)
    scale = torch.full(problem.q.shape[:-1], 0.05, device=device)
    problem.q, numbers = _e4m3_queries(problem, scale)
    for row, least in enumerate((0.0, -0.0, 1e-42)):
        scale[..., row::5], numbers[..., row::5, :] = least, 0
    _check_e4m3(problem, numbers, q_scale=scale)


@pytest.mark.parametrize("name", ["fp8-576", "fp8-512"])
@pytest.mark.parametrize("h", [1, 16, 17, 32, 64, 128])
@pytest.mark.parametrize("q_lens", [None, [4, 0, 7, 1, 2, 60, 1]], ids=["decode", "prefill"])
def test_e4m3_queries_of_many_and_of_few_tokens(device, name, h, q_lens):
    """Sequences shorter and longer than a tile, early queries that see little of one, and pages that are missing."""
    lens = [700, 5, 64, 31, 32, 130, 200]
    problem = _problem(FORMS[name], 16, h=h, s_q=2, lens=lens, q_lens=q_lens, device=device)
    problem.table[6, 1:4] = problems.UNUSED_PAGE
    problem.present[6, 16:64] = False
    problem.q, numbers = _e4m3_queries(problem, 0.05)
    _check_e4m3(problem, numbers, q_scale=0.05)


@pytest.mark.parametrize("page_size", [64, 5])
@pytest.mark.parametrize("h", [16, 32, 64, 128])
@pytest.mark.parametrize("name", ["bf16", *FORMS])
def test_numbers_of_a_query_reach_no_other(device, name, h, page_size):
    """NaN, infinities and the largest numbers in one row of a block; the rows beside it are as without them."""
    shape = {"h": h, "s_q": 2, "lens": [150, 5, 64, 1], "page_size": page_size, "device": device}
    problem = problems.make(**shape) if name == "bf16" else _problem(FORMS[name], **shape)
    out, lse = problem.expected(**problem.options)
    others = torch.ones(lse.shape, dtype=torch.bool, device=device)
    others[0, 1, 3] = others[2, 0, h - 1] = False
    plain = problem.q
    for value in (problems.NAN, float("inf"), -float("inf"), 3e38):
        problem.q = plain.clone()
        problem.q[0, 1, 3, 7] = problem.q[2, 0, h - 1, -6] = value
        for splits in (None, 2):
            got = problem.run(num_splits=splits)
            tolerance.check(got[0][others], got[1][others], out[others], lse[others])
            assert value is not problems.NAN or bool(got[0][~others].isnan().all())


@pytest.mark.parametrize("h", [16, 32, 64, 128])
@pytest.mark.parametrize("value", [problems.NAN, float("inf"), -float("inf")])
def test_a_scale_that_is_not_finite_reaches_who_attends_it(device, value, h):
    """The last token's, which only the second query token sees."""
    problem = _problem(FORMS["fp8_v32-576"], h=h, s_q=2, lens=[150, 5, 64, 70], device=device)
    out, lse = problem.expected(**problem.options)
    sees = torch.zeros(lse.shape, dtype=torch.bool, device=device)
    for request in (0, 2):
        page, token = divmod(int(problem.lens[request]) - 1, 64)
        scales = problem.cache[problem.table[request, page], token, 512:528].view(torch.float32)
        scales[1] = value
        sees[request, 1] = True
    for splits in (None, 2):
        got = problem.run(num_splits=splits)
        tolerance.check(got[0][~sees], got[1][~sees], out[~sees], lse[~sees])
        assert bool(got[0][sees].isnan().all())
        assert bool(got[1][sees].isnan().all())


@pytest.mark.parametrize("h", [16, 32, 64])
@pytest.mark.parametrize(
    ("name", "codes"), [(name, False) for name in FORMS] + [(name, True) for name in FORMS if FORMS[name].scale is None]
)
def test_keys_along_the_queries(device, name, codes, h):
    """All products of such a score have one sign: what sums lose adds up."""
    form = FORMS[name]
    problem = problems.make(d_qk=form.d_qk, b=4, h=h, seq=300, device=device)
    lens = problem.lens.tolist()
    for request, head in enumerate((0, h // 2, h - 1, 1)):
        if lens[request]:
            problem.keys[request, lens[request] // 2, 0] = problem.q[request, 0, head] / 30
    problem = _quantise(problem, form, 64)
    if codes:
        problem.q, numbers = _e4m3_queries(problem, 0.05)
        _check_e4m3(problem, numbers, q_scale=0.05)
    else:
        problem.check()


def test_appended_tokens_are_attended(device):
    """The way of a server: quantised as they come, then read."""
    for form in FORMS.values():
        problem = problems.make(h=16, lens=[100, 64, 1], d_qk=form.d_qk, device=device)
        options = {"kv_format": form.name} | ({"kv_scale": KV_SCALE} if form.scale is None else {})
        cache = ferromla.empty_kv_cache(9, 64, form.name, device, d_qk=form.d_qk)
        table = torch.tensor([[7, 2], [3, 0], [5, 1]], dtype=torch.int32, device=device)
        position = torch.arange(100, device=device)
        slots = table.long()[:, position // 64] * 64 + position % 64
        rows, slots = problem.keys[problem.present][:, 0], slots[problem.present]
        ferromla.append_kv(rows[:, :512], rows[:, 512:] if form.d_qk == 576 else None, cache, slots, **options)
        quantisation = {key: value for key, value in options.items() if key == "kv_scale"}
        tokens = formats.quantise(problem.keys.reshape(-1, form.d_qk), form, **quantisation)
        problem.keys = formats.dequantise(tokens, form, **quantisation).view(problem.keys.shape)
        problem.cache, problem.table = cache, table
        problem.check(**options)


# name: (argument, what changes, error)
BAD = {
    "kv_scale of fp8_v32": ("kv_scale", lambda p: {"kv_scale": 1.0}, ferromla.InvalidArgument),
    "q_scale of bfloat16": ("q_scale", lambda p: {"q_scale": 1.0}, ferromla.InvalidArgument),
    "format unsaid": ("kv_format", lambda p: {"kv_format": None}, ferromla.InvalidArgument),
    "format of other bytes": ("kv_cache", lambda p: {"kv_format": "fp8"}, ferromla.InvalidArgument),
    "16-bit format": ("kv_format", lambda p: {"kv_format": "bf16"}, ferromla.InvalidArgument),
    "e4m3 queries": ("q", lambda p: {"q": p.q.to(E4M3)}, ferromla.Unsupported),
    "width": ("kv_cache", lambda p: {"q": p.q[..., :512]}, ferromla.InvalidArgument),
    "pair": ("kv_cache", lambda p: {"kv_cache": (p.cache, p.cache)}, ferromla.InvalidArgument),
    "sparse only": (
        "kv_format",
        lambda p: {"kv_cache": p.cache[..., :584].contiguous(), "kv_format": "fp8_v4"},
        ferromla.Unsupported,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused_by_name(name):
    argument, change, error = BAD[name]
    problem = _problem(FORMS["fp8_v32-576"], h=16, seq=70)
    out, lse = problems.poisoned_outputs(problem.q)
    call = {"q": problem.q, "kv_cache": problem.cache, "block_table": problem.table, "seq_lens": problem.lens}
    with pytest.raises(error) as caught:
        ferromla.decode(**call | {"kv_format": "fp8_v32", "out": out, "lse": lse} | change(problem))
    assert caught.value.argument == argument
    assert bool(out.isnan().all())


def test_operators_take_formats_and_scales(device):
    """torch.ops.ferromla: what the functions give."""
    problem = _problem(FORMS["fp8-576"], h=16, s_q=2, lens=[100, 0, 70], device=device)
    codes, _ = _e4m3_queries(problem, 0.07)
    scale = torch.full(codes.shape[:-1], 0.07, device=device)
    options = {**problem.options, "q_scale": scale}
    inputs = codes, problem.cache, problem.table, problem.lens
    got, want = torch.ops.ferromla.decode(*inputs, **options), ferromla.decode(*inputs, **options)
    assert got[0].dtype == torch.bfloat16
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    rows = problems.random_keys(3, 576).to(device, torch.bfloat16)
    slots = torch.tensor([5, -1, 70], device=device)
    caches = [problem.cache.clone() for _ in range(2)]
    parts = rows[:, :512].contiguous(), rows[:, 512:].contiguous()
    torch.ops.ferromla.append_kv(*parts, caches[0], slots, kv_format="fp8", kv_scale=KV_SCALE)
    ferromla.append_kv(*parts, caches[1], slots, kv_format="fp8", kv_scale=KV_SCALE)
    assert torch.equal(*caches)
    torch.library.opcheck(torch.ops.ferromla.append_kv.default, (*parts, caches[0], slots, "fp8", KV_SCALE))
