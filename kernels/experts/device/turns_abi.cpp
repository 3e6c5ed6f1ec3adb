// The C ABI of turns: what ../device/turns.py calls. Every failure is a text for people in `message`.

#include <cstdio>
#include <cstring>
#include <exception>

#include "kernels/experts/device/turns.h"
#include "kernels/experts/host/abi.h"
#include "kernels/workers/abi.h"

using namespace thimble;

namespace {
void write(char* message, int64_t bytes, const std::string& text) { std::snprintf(message, size_t(bytes), "%s", text.c_str()); }
}  // namespace

// `memory`: addresses of TurnMemory's members in order; `shape`: TurnShape's, the number of waves before their ends. The host and all memory must outlive the turns.
THIMBLE_API void* thimble_turns_open(void* host, const uint64_t* memory, const int32_t* shape) {
  const TurnMemory where{reinterpret_cast<const uint32_t*>(memory[0]), reinterpret_cast<uint32_t*>(memory[1]),
                         reinterpret_cast<uint32_t*>(memory[2]),       reinterpret_cast<const int32_t*>(memory[3]),
                         reinterpret_cast<const float*>(memory[4]),    reinterpret_cast<int64_t*>(memory[5]),
                         reinterpret_cast<float*>(memory[6]),          reinterpret_cast<const int64_t*>(memory[7]),
                         reinterpret_cast<const uint32_t*>(memory[8])};
  const TurnShape sizes{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[7], shape[8],
                        std::vector<int>(shape + 10, shape + 10 + shape[9])};
  return new Turns(step_of(host), cache_of(host), catalog_of(host), where, sizes);
}

THIMBLE_API void thimble_turns_close(void* turns) { delete static_cast<Turns*>(turns); }

// 0, or 1 with a message.
THIMBLE_API int thimble_turns_copy_through(void* turns, void* context, int route, uint64_t staging, int lanes, char* message, int64_t message_bytes) {
  std::string reason;
  const CudaDriver* driver = CudaDriver::load(reason);
  try {
    if (driver) {
      static_cast<Turns*>(turns)->copy_through(*driver, context, Route(route), staging, lanes);
      return 0;
    }
  } catch (const std::exception& error) {
    reason = error.what();
  }
  write(message, message_bytes, reason);
  return 1;
}

// `vram`: an open VramSlots, or null. It must outlive the turns.
THIMBLE_API void thimble_turns_use(void* turns, const void* vram) {
  static_cast<Turns*>(turns)->use(static_cast<const VramSlots*>(vram));
}

THIMBLE_API void thimble_turns_share(void* turns, int fixed, double initial) {
  static_cast<Turns*>(turns)->set_share(fixed, initial);
}

// How many turns were served (Turns::serve), or -1 with a message.
THIMBLE_API int thimble_turns_serve(void* turns, int count, int64_t timeout_us, char* message, int64_t message_bytes) {
  try {
    return static_cast<Turns*>(turns)->serve(count, timeout_us);
  } catch (const std::exception& failure) {
    write(message, message_bytes, failure.what());
    return -1;
  }
}

// 0, or 1 with a message.
THIMBLE_API int thimble_turns_retire(void* turns, char* message, int64_t message_bytes) {
  try {
    static_cast<Turns*>(turns)->retire();
    return 0;
  } catch (const std::exception& failure) {
    write(message, message_bytes, failure.what());
    return 1;
  }
}

// The names of thimble_turns_times' values, in its order.
THIMBLE_API const char* thimble_turns_time_names() {
  return "turns gpu_experts host_experts vram_experts host_ns plan_ns idle_ns waited_ns share_thousandths";
}

THIMBLE_API void thimble_turns_times(void* turns, int64_t* out) {
  const Turns& t = *static_cast<Turns*>(turns);
  const Turns::Times& times = t.times();
  const int64_t values[] = {times.turns,   times.gpu_experts, times.host_experts, times.vram_experts,
                            times.host_ns, times.plan_ns,     times.idle_ns,      times.waited_ns,
                            int64_t(t.share_now() * 1000)};
  std::memcpy(out, values, sizeof values);
}
