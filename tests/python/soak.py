"""Very many random small problems of attention against float64, by several processes, under a watchdog.

    python tests/python/soak.py [--problems 100000] [--seed 1] [--workers 12] [--device cuda] [--hang-seconds 60]
    python tests/python/soak.py --seed 1 --only 4711    # this one problem again
    python tests/python/soak.py --device emulated       # the kernels on the host: tests/emulator/build.py first

Requests, lengths, heads, pages, formats, options, layouts and plans are drawn anew for each problem (soak_spec.py,
soak_sparse.py). A
result that is off, an error, a hang or a crash names the problem in full, with the command that runs it again; the
exit status is then 1.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import emulated
import soak_problem
import soak_sparse
import soak_spec

MOST_FAILURES = 10
START_SECONDS = 300  # for importing torch and waking the GPU, when many processes do so at once
REPORT_SECONDS = 15
STARTING, FINISHED = -1, -2


@dataclass(frozen=True)
class Soak:
    """What to run."""

    problems: int
    seed: int
    workers: int
    device: str
    hang_seconds: float

    @property
    def limits(self) -> soak_spec.Limits:
        """Sizes that suit the device."""
        return {"cuda": soak_spec.GPU, "cpu": soak_spec.CPU, "emulated": soak_spec.EMULATED}[self.device]

    def spec(self, index: int) -> soak_spec.Spec | soak_sparse.SparseSpec:
        """One of its problems: every third is a sparse one."""
        kind = soak_sparse if index % 3 == 2 else soak_spec
        return kind.draw(self.seed, index, self.limits)

    def describe(self, index: int, what: str) -> str:
        """What went wrong with a problem, the problem, and how to run it again."""
        again = f"python tests/python/soak.py --seed {self.seed} --device {self.device} --only {index}"
        return f"problem {index}: {what}\n{self.spec(index)}\n  again: {again}"

    def pool(self) -> soak_problem.Pool:
        """Random numbers for the problems."""
        device = torch.device("cpu" if self.device == "emulated" else self.device)
        return soak_problem.Pool(self.seed, self.limits, device)

    def begin(self) -> None:
        """What a process does first."""
        # Tensors are small, and other processes and the CPU backend's own threads use the cores.
        torch.set_num_threads(1)
        if self.device == "emulated":
            emulated.install()

    def faults(self, index: int, pool: soak_problem.Pool) -> list[str]:
        """What is wrong with one problem's result."""
        spec = self.spec(index)
        if isinstance(spec, soak_sparse.SparseSpec):
            return soak_sparse.SparseProblem(spec, pool.device).faults()
        return soak_problem.Problem(spec, pool).faults()


def work(soak: Soak, worker: int, at, failures, before: Callable[[], None] | None) -> None:
    """One process: every ``workers``-th problem. ``at[worker]`` says which one is running."""
    if before:
        before()
    soak.begin()
    pool = soak.pool()
    for index in range(worker, soak.problems, soak.workers):
        at[worker] = index
        try:
            found = soak.faults(index, pool)
        except Exception:
            failures.put((index, traceback.format_exc()))
            # A CUDA error may have ended the context: what followed would fail for no reason of its own.
            if soak.device != "cpu":
                os._exit(1)
            continue
        if found:
            failures.put((index, "; ".join(found)))
    if soak.device == "emulated" and not emulated.launches():
        failures.put((STARTING, "no kernel has run on the emulated GPU"))
    at[worker] = FINISHED


@dataclass
class Watch:
    """The processes at work, and what they have reported."""

    soak: Soak
    at: object
    queue: object
    processes: list
    since: dict[int, tuple[int, float]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def collect(self) -> None:
        """Takes in what workers have found wrong."""
        while not self.queue.empty():
            index, what = self.queue.get()
            self.failures[index] = what

    def done(self) -> int:
        """Problems that are behind, about."""
        each = self.soak.workers
        return sum(
            at // each if at >= 0 else len(range(worker, self.soak.problems, each)) if at == FINISHED else 0
            for worker, at in enumerate(self.at)
        )

    def look(self, now: float) -> bool:
        """Whether anybody is still at work; ends who hangs, notes who died."""
        running = False
        for worker, process in enumerate(self.processes):
            at = self.at[worker]
            if at == FINISHED:
                continue
            if process.exitcode is not None:
                self._lost(worker, f"the process ended with status {process.exitcode}")
                continue
            running = True
            if self.since.get(worker, (None, now))[0] != at:
                self.since[worker] = (at, now)
            limit = START_SECONDS if at == STARTING else self.soak.hang_seconds
            if now - self.since[worker][1] > limit:
                self._lost(worker, f"hangs: no result after {limit:g} s")
                process.kill()
        return running

    def _lost(self, worker: int, what: str) -> None:
        at = self.at[worker]
        # What a worker said itself before it ended says more.
        self.collect()
        if at == STARTING:
            self.failures.setdefault(STARTING, f"worker {worker} before its first problem: {what}")
        else:
            self.failures.setdefault(at, what)
        self.at[worker] = FINISHED


def run(soak: Soak, before: Callable[[], None] | None = None) -> dict[int, str]:
    """Runs the soak; gives what went wrong by problem. ``before`` is called in each process first."""
    context = multiprocessing.get_context("spawn")
    at = context.Array("q", [STARTING] * soak.workers, lock=False)
    queue = context.SimpleQueue()
    processes = [
        context.Process(target=work, args=(soak, worker, at, queue, before), daemon=True)
        for worker in range(soak.workers)
    ]
    for process in processes:
        process.start()
    watch = Watch(soak, at, queue, processes)
    next_report = time.monotonic() + REPORT_SECONDS
    try:
        while watch.look(now := time.monotonic()) and len(watch.failures) < MOST_FAILURES:
            watch.collect()
            if now >= next_report:
                print(f"{watch.done():,} of {soak.problems:,}, {len(watch.failures)} failed", flush=True)
                next_report = now + REPORT_SECONDS
            time.sleep(0.05)
        watch.collect()
    finally:
        for process in processes:
            process.kill()
    return watch.failures


def parse(arguments: list[str] | None) -> tuple[Soak, int | None]:
    """The command line: what to run, and the one problem to run alone."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, help="default: 100000 on a GPU, 2000 on a CPU, 300 emulated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, help="processes; default: as many as help")
    parser.add_argument("--device", choices=("cuda", "cpu", "emulated"), default="cuda" if gpu else "cpu")
    parser.add_argument("--hang-seconds", type=float, default=60, help="longest that one problem may take")
    parser.add_argument("--only", type=int, metavar="INDEX", help="this problem alone, in this process")
    options = parser.parse_args(arguments)
    cores = os.cpu_count() or 1
    # The CPU backend uses all cores by itself.
    default = {"cuda": (100_000, min(12, max(1, cores - 2))), "cpu": (2_000, 1), "emulated": (300, cores)}
    problems, workers = default[options.device]
    problems = problems if options.problems is None else options.problems
    workers = options.workers or workers
    return Soak(problems, options.seed, workers, options.device, options.hang_seconds), options.only


def _kinds(spec: soak_spec.Spec | soak_sparse.SparseSpec) -> tuple[str, ...]:
    sparse = isinstance(spec, soak_sparse.SparseSpec)
    kv_format = spec.main.kv_format if sparse else spec.kv_format or spec.dtype
    return spec.operation, f"cache: {kv_format}", f"plan: {spec.planning}"


def summary(soak: Soak) -> str:
    """What the problems were, by operation and planning."""
    specs = [soak.spec(index) for index in range(0, soak.problems, max(1, soak.problems // 5000))]
    counts = collections.Counter(x for spec in specs for x in _kinds(spec))
    return ", ".join(f"{name} {100 * count / len(specs):.0f} %" for name, count in sorted(counts.items()))


def main(arguments: list[str] | None = None, before: Callable[[], None] | None = None) -> int:
    """Run it; 1 where anything failed."""
    soak, only = parse(arguments)
    if only is not None:
        soak.begin()
        found = soak.faults(only, soak.pool())
        print(soak.describe(only, "; ".join(found) or "right"))
        return 1 if found else 0
    print(f"{soak.problems:,} problems on {soak.device}, seed {soak.seed}, {soak.workers} workers", flush=True)
    started = time.monotonic()
    failures = run(soak, before)
    for index, what in sorted(failures.items()):
        print(what if index == STARTING else soak.describe(index, what))
    seconds = time.monotonic() - started
    if failures:
        print(f"\nseed {soak.seed}: {len(failures)} problems failed, after {seconds:.0f} s")
        return 1
    print(f"{soak.problems:,} problems, seed {soak.seed}: no mismatch and no hang, {seconds:.0f} s ({summary(soak)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
