// The C ABI of rings: what ring.py calls. Every failure is a text for people in `message`.

#include <cstdio>
#include <exception>

#include "kernels/experts/device/ring.h"
#include "kernels/experts/host/abi.h"
#include "kernels/workers/abi.h"

using namespace thimble;

namespace {
void write(char* message, int64_t bytes, const std::string& text) { std::snprintf(message, size_t(bytes), "%s", text.c_str()); }
}  // namespace

// `memory`: addresses of RingMemory's members in order; `on_gpu` 0: all of it is the host's. Null with a message if it cannot be
// had. The host and all memory must outlive the ring.
THIMBLE_API void* thimble_ring_open(void* host, int on_gpu, void* context, const uint64_t* memory, int groups, int group,
                                    int64_t most_rows, char* message, int64_t message_bytes) {
  std::string reason;
  const CudaDriver* driver = on_gpu ? CudaDriver::load(reason) : nullptr;
  try {
    if (driver || !on_gpu)
      return new Ring(cache_of(host), catalog_of(host), driver, context,
                      {memory[0], reinterpret_cast<int32_t*>(memory[1]), memory[2]}, {groups, group, most_rows});
  } catch (const std::exception& error) {
    reason = error.what();
  }
  write(message, message_bytes, reason);
  return nullptr;
}

// No copy may be wanted any more; waits for those under way.
THIMBLE_API void thimble_ring_close(void* ring) { delete static_cast<Ring*>(ring); }

// How many blocks are on their way: Ring::ahead. -1: the GPU has failed, with a message.
THIMBLE_API int thimble_ring_ahead(void* ring, char* message, int64_t message_bytes) {
  try {
    return static_cast<Ring*>(ring)->ahead();
  } catch (const std::exception& failure) {
    write(message, message_bytes, failure.what());
  }
  return -1;
}

// How many blocks: Ring::next. words[2 + 3 * n]: how many were copied, how many passes there are, then first item, items, most
// rows of each. -1: a block cannot be had, -2: the GPU has failed, both with a message.
THIMBLE_API int thimble_ring_next(void* ring, const int32_t* counts, int64_t timeout_ns, void* stream, int64_t* words,
                                  char* message, int64_t message_bytes) {
  std::vector<Pass> passes;
  std::string error;
  int count, copied = 0;
  try {
    count = static_cast<Ring*>(ring)->next(counts, timeout_ns, stream, &passes, &copied, &error);
  } catch (const std::exception& failure) {
    error = failure.what();
    count = -2;
  }
  if (count < 0) write(message, message_bytes, error);
  *words++ = copied;
  *words++ = int64_t(passes.size());
  for (const Pass& pass : passes) {
    *words++ = pass.first;
    *words++ = pass.items;
    *words++ = pass.most_rows;
  }
  return count;
}

// 0, or 1 with a message: the GPU has failed.
THIMBLE_API int thimble_ring_used(void* ring, void* stream, char* message, int64_t message_bytes) {
  try {
    static_cast<Ring*>(ring)->used(stream);
    return 0;
  } catch (const std::exception& failure) {
    write(message, message_bytes, failure.what());
  }
  return 1;
}

THIMBLE_API void thimble_ring_drain(void* ring) { static_cast<Ring*>(ring)->drain(); }
