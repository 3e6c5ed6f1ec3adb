// Which kernels run here, and the C ABI by which tests and measurements reach one instruction set's sums directly.

#include "kernels/experts/cpu/choose.h"

#include "kernels/experts/cpu/quantise.h"
#include "kernels/workers/abi.h"

const thimble::Kernels* thimble::kernels_for(Isa isa) {
  if (!processor_has(isa)) return nullptr;
  switch (isa) {
    case Isa::plain: return plain_kernels();
    case Isa::avx2: return avx2_kernels();
    case Isa::avxvnni: return avxvnni_kernels();
    case Isa::avx512: return avx512_kernels();
  }
  return nullptr;
}

// `sizes`: latent, width, the four offsets of a block and its bytes.
static thimble::Shape shape_of(const int64_t* sizes) {
  return {int32_t(sizes[0]), int32_t(sizes[1]), sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]};
}

// values int16 [tokens, latent] -> sums int64 [tokens, end - begin]. Returns 0 if the instruction set is not available.
THIMBLE_API int thimble_up_sums(int isa, const int64_t* sizes, const uint8_t* block, const int16_t* values, int tokens,
                                int begin, int end, int64_t* sums) {
  using namespace thimble;
  const Kernels* kernels = kernels_for(Isa(isa));
  if (!kernels) return 0;
  const Shape shape = shape_of(sizes);
  Inputs inputs;
  inputs.resize(tokens, shape.latent);
  Input of[MOST_TOKENS];
  for (int t = 0; t < tokens; t++) {
    inputs.set_quantised(t, values + int64_t(t) * shape.latent);
    of[t] = inputs.of(t);
  }
  kernels->up(shape, block, of, tokens, begin, end, sums);
  return 1;
}

// rows int32 [count], values int16 [tokens, count] -> sums int64 [tokens, end - begin].
THIMBLE_API int thimble_down_sums(int isa, const int64_t* sizes, const uint8_t* block, const int32_t* rows, int count,
                                  const int16_t* values, int tokens, int begin, int end, int64_t* sums) {
  using namespace thimble;
  const Kernels* kernels = kernels_for(Isa(isa));
  if (!kernels) return 0;
  Alive alive{rows, {}, count};
  for (int t = 0; t < tokens; t++) alive.values[t] = values + int64_t(t) * count;
  kernels->down(shape_of(sizes), block, alive, tokens, begin, end, sums);
  return 1;
}

// Whether the experts can run with an instruction set here.
THIMBLE_API int thimble_isa_works(int isa) { return thimble::kernels_for(thimble::Isa(isa)) != nullptr; }
