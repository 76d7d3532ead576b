"""CUDA graphs of calls."""

from __future__ import annotations

import torch


def captured(run) -> torch.cuda.CUDAGraph:
    """Runs once eagerly on a side stream, then captures."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
