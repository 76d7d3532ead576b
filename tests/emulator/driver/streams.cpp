// The emulated driver's streams, events, captures and graphs.
#include <chrono>
#include <map>
#include <optional>
#include <thread>

#include "driver.h"

namespace emulation::driver {
namespace {

using Clock = std::chrono::steady_clock;

// Work in the order in which it came, which is an order that its streams allow.
using Graph = std::vector<Work>;

struct Capture {
  CUstreamCaptureMode mode;
  std::thread::id thread;
  Graph graph;
  bool is_spoilt = false; /* by a call that captures forbid */
};

struct Stream {
  std::optional<Capture> capture;
};

struct Event {
  bool has_time;
  std::optional<Clock::time_point> recorded;
};

struct Executable {
  Graph graph;
};

// The streams that exist without being made: that of null handles, and one for each thread.
struct Streams {
  Handles<Stream> made;
  Stream legacy;
  std::map<std::thread::id, Stream> of_threads;
  std::vector<Stream*> captured;
};

Streams& streams() { return leaked<Streams>(); }
Handles<Graph>& graphs() { return leaked<Handles<Graph>>(); }
Handles<Executable>& executables() { return leaked<Handles<Executable>>(); }
Handles<Event>& events() { return leaked<Handles<Event>>(); }

// How much of what captures forbid the calling thread asks to be told of.
CUstreamCaptureMode& mode_of_thread() {
  static thread_local CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  return mode;
}

bool is_mode(CUstreamCaptureMode mode) {
  return mode == CU_STREAM_CAPTURE_MODE_GLOBAL || mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL ||
         mode == CU_STREAM_CAPTURE_MODE_RELAXED;
}

// Null: there is no such stream.
Stream* find_stream(CUstream handle) {
  if (handle == nullptr || handle == CU_STREAM_LEGACY) return &streams().legacy;
  if (handle == CU_STREAM_PER_THREAD) return &streams().of_threads[std::this_thread::get_id()];
  return streams().made.find(handle);
}

// What an exported function does with a stream.
template <class Body>
CUresult with_stream(CUstream handle, Body body) {
  return in_context([&]() -> CUresult {
    Stream* const stream = find_stream(handle);
    return stream == nullptr ? CUDA_ERROR_INVALID_HANDLE : body(*stream);
  });
}

// As the driver's documentation has it for the modes of the calling thread and of the capture.
bool forbids(const Capture& capture) {
  if (mode_of_thread() == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
  if (capture.thread == std::this_thread::get_id()) return capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
  return mode_of_thread() == CU_STREAM_CAPTURE_MODE_GLOBAL && capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

void forget_capture(Stream& stream) {
  std::vector<Stream*> others;
  for (Stream* captured : streams().captured) {
    if (captured != &stream) others.push_back(captured);
  }
  streams().captured = std::move(others);
  stream.capture.reset();
}

CUresult begin_capture(Stream& stream, CUstreamCaptureMode mode) {
  if (!is_mode(mode)) return CUDA_ERROR_INVALID_VALUE;
  if (&stream == &streams().legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream.capture) return CUDA_ERROR_ILLEGAL_STATE;
  stream.capture = Capture{mode, std::this_thread::get_id(), {}};
  streams().captured.push_back(&stream);
  return CUDA_SUCCESS;
}

CUresult end_capture(Stream& stream, CUgraph* graph) {
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!stream.capture) return CUDA_ERROR_ILLEGAL_STATE;
  const bool here = stream.capture->thread == std::this_thread::get_id();
  if (!here && stream.capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  const Capture capture = std::move(*stream.capture);
  forget_capture(stream);
  *graph = nullptr;
  return capture.is_spoilt ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : graphs().give(graph, capture.graph);
}

CUstreamCaptureStatus capture_status(const Stream& stream) {
  if (!stream.capture) return CU_STREAM_CAPTURE_STATUS_NONE;
  return stream.capture->is_spoilt ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

// A stream that is captured has no work that could be waited for.
CUresult wait(Stream& stream) {
  if (!stream.capture) return CUDA_SUCCESS;
  stream.capture->is_spoilt = true;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult launch(const Graph& graph, CUstream stream) {
  for (const Work& work : graph) {
    const CUresult result = submit(stream, work);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

}  // namespace

CUresult submit(CUstream handle, Work work) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (!stream->capture) return work();
  if (stream->capture->is_spoilt) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  stream->capture->graph.push_back(std::move(work));
  return CUDA_SUCCESS;
}

CUresult allowed_during_captures() {
  CUresult result = CUDA_SUCCESS;
  for (Stream* stream : streams().captured) {
    if (!forbids(*stream->capture)) continue;
    stream->capture->is_spoilt = true;
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

}  // namespace emulation::driver

using namespace emulation::driver;

extern "C" {

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  return in_context([&]() -> CUresult {
    if ((flags & ~CU_STREAM_NON_BLOCKING) != 0) return CUDA_ERROR_INVALID_VALUE;
    return streams().made.give(stream);
  });
}

CUresult cuStreamDestroy_v2(CUstream handle) {
  return in_context([&]() -> CUresult {
    Stream* const stream = streams().made.find(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    forget_capture(*stream);
    return streams().made.take_back(handle);
  });
}

CUresult cuStreamSynchronize(CUstream handle) { return with_stream(handle, wait); }

CUresult cuStreamQuery(CUstream handle) { return with_stream(handle, wait); }

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
  return with_stream(handle, [&](Stream& stream) { return begin_capture(stream, mode); });
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  return with_stream(handle, [&](Stream& stream) { return end_capture(stream, graph); });
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  return with_stream(handle, [&](const Stream& stream) {
    if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *status = capture_status(stream);
    return CUDA_SUCCESS;
  });
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  if (mode == nullptr || !is_mode(*mode)) return CUDA_ERROR_INVALID_VALUE;
  std::swap(*mode, mode_of_thread());
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph handle, unsigned long long flags) {
  return in_context([&]() -> CUresult {
    const Graph* const graph = graphs().find(handle);
    if (graph == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return flags == 0 ? executables().give(executable, Executable{*graph}) : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream) {
  return in_context([&]() -> CUresult {
    const Executable* const executable = executables().find(handle);
    return executable == nullptr ? CUDA_ERROR_INVALID_HANDLE : launch(executable->graph, stream);
  });
}

CUresult cuGraphDestroy(CUgraph graph) {
  return in_context([&] { return graphs().take_back(graph); });
}

CUresult cuGraphExecDestroy(CUgraphExec executable) {
  return in_context([&] { return executables().take_back(executable); });
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  const bool has_time = (flags & CU_EVENT_DISABLE_TIMING) == 0;
  return in_context([&] { return events().give(event, Event{has_time, {}}); });
}

CUresult cuEventDestroy_v2(CUevent event) {
  return in_context([&] { return events().take_back(event); });
}

// In a capture an event is an edge of the graph, and work that keeps its order needs none.
CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  return with_stream(stream_handle, [&](const Stream& stream) {
    Event* const event = events().find(handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (!stream.capture) event->recorded = Clock::now();
    return CUDA_SUCCESS;
  });
}

CUresult cuEventSynchronize(CUevent event) {
  return in_context([&] { return events().find(event) == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS; });
}

CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent begin, CUevent end) {
  return in_context([&] {
    if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const Event *const first = events().find(begin), *const last = events().find(end);
    if (first == nullptr || last == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (!first->has_time || !last->has_time || !first->recorded || !last->recorded) return CUDA_ERROR_INVALID_HANDLE;
    *milliseconds = std::chrono::duration<float, std::milli>(*last->recorded - *first->recorded).count();
    return CUDA_SUCCESS;
  });
}

}  // extern "C"
