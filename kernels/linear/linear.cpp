// A linear layer on the worker pool, and its C ABI.

#include "kernels/linear/linear.h"

#include <algorithm>

#include "kernels/workers/abi.h"
#include "kernels/workers/isa.h"
#include "kernels/workers/workers.h"

namespace thimble {
namespace {

LinearTile tile_for(Isa isa) {
  if (!processor_has(isa)) return nullptr;
  switch (isa) {
    case Isa::plain: return plain_linear();
    case Isa::avx512: return avx512_linear();
    default: return avx2_linear();  // VNNI adds nothing to float32
  }
}

// Tiles are strips of outputs, so a strip's weights are read from memory once and serve all rows from a cache.
class Linear : public Work {
 public:
  Linear(const Matrices& matrices, LinearTile tile, Workers& pool) : matrices_(matrices), tile_(tile), pool_(pool) {
    constexpr int64_t STRIP_BYTES = 128 * 1024;
    const int64_t in_cache = std::max<int64_t>(1, STRIP_BYTES / std::max<int64_t>(1, matrices.inputs * 4));
    const int64_t for_balance = (matrices.outputs - 1) / (4 * pool.threads()) + 1;
    strip_ = std::max<int64_t>(12, std::min(in_cache, for_balance) / 12 * 12);  // whole groups of 3 and of 4 outputs
    prepare(int((matrices.outputs + strip_ - 1) / strip_));
  }

  void run(int tile) override { tile_(matrices_, tile * strip_, std::min((tile + 1) * strip_, matrices_.outputs)); }
  void finish() override {
    done.store(true);
    pool_.signal();
  }

  std::atomic<bool> done{false};

 private:
  const Matrices matrices_;
  const LinearTile tile_;
  Workers& pool_;
  int64_t strip_;
};

}  // namespace
}  // namespace thimble

// out[rows, outputs] = x[rows, inputs] * weight[outputs, inputs]^T. Returns 0 if the instruction set is not available.
THIMBLE_API int thimble_linear(void* workers, int isa, const float* x, const float* weight, float* out, int64_t rows,
                               int64_t inputs, int64_t outputs) {
  using namespace thimble;
  const LinearTile tile = tile_for(Isa(isa));
  if (!tile) return 0;
  if (rows == 0 || outputs == 0) return 1;
  Workers& pool = *static_cast<Workers*>(workers);
  Linear work({x, weight, out, rows, inputs, outputs}, tile, pool);
  pool.begin();
  pool.publish(work, false);
  if (pool.threads() > 1) pool.signal();
  while (!work.done.load()) {
    const uint64_t seen = pool.signals();
    if (!pool.help() && !work.done.load()) pool.wait(seen);
  }
  pool.end();
  return 1;
}
