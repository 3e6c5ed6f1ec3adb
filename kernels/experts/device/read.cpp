// Plain reading of memory by the worker pool: what a benchmark holds the expert kernels against.

#include <atomic>
#include <cstdint>

#include "kernels/workers/abi.h"
#include "kernels/workers/workers.h"

using namespace thimble;

namespace {

constexpr int64_t TILE_BYTES = 1 << 20;

struct Read final : Work {
  const uint64_t* words;
  int64_t count;
  Workers& workers;
  std::atomic<uint64_t> total{0};
  std::atomic<bool> done{false};

  Read(const uint64_t* from, int64_t bytes, Workers& by) : words(from), count(bytes / 8), workers(by) {}

  void run(int tile) override {
    const int64_t size = TILE_BYTES / 8, begin = tile * size, end = begin + size < count ? begin + size : count;
    uint64_t sums[32] = {};  // independent, so that the compiler reads with whole vectors
    for (int64_t i = begin; i + 32 <= end; i += 32)
      for (int lane = 0; lane < 32; lane++) sums[lane] += words[i + lane];
    uint64_t sum = 0;
    for (uint64_t s : sums) sum += s;
    total.fetch_add(sum, std::memory_order_relaxed);
  }

  void finish() override {
    done.store(true);
    workers.signal();
  }
};

}  // namespace

// Reads `bytes` from `address` once, by all threads of the pool. Returns a sum, so that nothing can be left out.
THIMBLE_API uint64_t thimble_read(void* workers, uint64_t address, int64_t bytes) {
  Workers& pool = *static_cast<Workers*>(workers);
  Read read(reinterpret_cast<const uint64_t*>(address), bytes, pool);
  read.prepare(int((bytes + TILE_BYTES - 1) / TILE_BYTES));
  pool.begin();
  pool.publish(read, false);
  pool.signal();
  while (!read.done.load()) {
    const uint64_t seen = pool.signals();
    if (!pool.help() && !read.done.load()) pool.wait(seen);
  }
  pool.end();
  return read.total.load();
}
