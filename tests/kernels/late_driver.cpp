// A CUDA driver whose streams are late: what is queued runs when somebody waits, in any order that streams and events allow. Only
// the calls that kernels/experts/device/cuda_driver.h looks up; memory is the host's. For test_ring_order.py, one thread.

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <vector>

namespace {
struct Event {
  long recorded = 0, done = 0;
};
struct Operation {
  std::function<bool()> ready;
  std::function<void()> run;
};
using Stream = std::deque<Operation>;

std::vector<Stream*> streams{new Stream};  // the first is the one of handle null
std::mt19937 chance;
int forgotten = 0;  // every so many waits for an event are forgotten

Stream& of(void* handle) { return handle ? *static_cast<Stream*>(handle) : *streams[0]; }

bool step() {
  std::vector<Stream*> able;
  for (Stream* stream : streams)
    if (!stream->empty() && stream->front().ready()) able.push_back(stream);
  if (able.empty()) return false;
  Stream* const stream = able[chance() % able.size()];
  const Operation operation = stream->front();
  stream->pop_front();
  operation.run();
  return true;
}

int add(void* stream, std::function<void()> run, std::function<bool()> ready = [] { return true; }) {
  of(stream).push_back({std::move(ready), std::move(run)});
  if (chance() % 3 == 0) step();
  return 0;
}

int until(const std::function<bool()>& done) {
  while (!done())
    if (!step()) return 1;  // nothing can go on: a wait for ever
  return 0;
}
}  // namespace

extern "C" {
void late_begin(unsigned seed, int forget) {
  chance.seed(seed);
  forgotten = forget;
}
int late_launch(void* stream, void (*kernel)(int64_t), int64_t argument) {
  return add(stream, [=] { kernel(argument); });
}
int cuCtxSetCurrent(void*) { return 0; }
int cuStreamCreate(void** stream, unsigned) {
  streams.push_back(new Stream);
  *stream = streams.back();
  return 0;
}
int cuStreamDestroy_v2(void*) { return 0; }
int cuStreamSynchronize(void* stream) {
  return until([=] { return of(stream).empty(); });
}
int cuStreamQuery(void* stream) { return of(stream).empty() ? 0 : 600; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  return add(stream, [=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); });
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  return add(stream, [=] { std::memcpy(to, reinterpret_cast<void*>(from), bytes); });
}
int cuEventCreate(void** event, unsigned) {
  *event = new Event;
  return 0;
}
int cuEventDestroy_v2(void*) { return 0; }
int cuEventRecord(void* handle, void* stream) {
  Event* const event = static_cast<Event*>(handle);
  const long number = ++event->recorded;
  return add(stream, [=] { event->done = number; });
}
int cuEventSynchronize(void* handle) {
  const Event* const event = static_cast<Event*>(handle);
  return until([=] { return event->done >= event->recorded; });
}
int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
  if (forgotten && chance() % unsigned(forgotten) == 0) return 0;
  const Event* const event = static_cast<Event*>(handle);
  const long number = event->recorded;
  return add(stream, [] {}, [=] { return event->done >= number; });
}
int cuStreamWriteValue32_v2(void*, uint64_t, uint32_t, unsigned) { return 1; }
int cuGetErrorString(int, const char** text) {
  *text = "late driver";
  return 0;
}
}
