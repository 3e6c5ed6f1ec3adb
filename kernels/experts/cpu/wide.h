// The expert sums over wide vectors, written once. avx2.cpp, avxvnni.cpp and avx512.cpp each define a vector type V (see
// the list in vector256.h) and `dots`, then include this. Everything has internal linkage: code compiled for one
// instruction set must never be merged by the linker with another's.
#pragma once

#include <cstring>

#include "kernels/experts/cpu/sums.h"

namespace thimble {
namespace {

using Reg = V::Reg;

constexpr int ROWS = 4;  // rows in flight: as many streams of loads and independent sums
constexpr int AHEAD_BYTES = 4096;  // how far before its use a row of `up` is asked for
constexpr int AHEAD_ROWS = 4;      // the same for alive rows of `down`
constexpr int CHUNK = 2 * V::BYTES;  // codes in a vector
constexpr int PAIRS = GROUP / 2;

// Twice the E2M1 values of a vector of packed codes, the even and the odd ones apart.
inline void decode(Reg packed, Reg& even, Reg& odd) {
  const Reg nibble = V::set8(15), table = V::codes();
  even = V::shuffle8(table, V::both(packed, nibble));
  odd = V::shuffle8(table, V::both(V::right16<4>(packed), nibble));
}

// Adds dot * scale of each group to an int64: a group's two halves are neighbouring int32, its scale the low one of two.
inline Reg accumulate(Reg sum, Reg halves, Reg scale) {
  return V::add64(sum, V::multiply32(V::add32(halves, V::right64<32>(halves)), scale));
}

template <int TOKENS, int COUNT>
void up_rows(const Shape& shape, const uint8_t* block, const Input* inputs, int n, int last_row, int64_t* sums,
             int stride) {
  const int64_t row_bytes = shape.row_bytes(), scale_bytes = shape.latent / GROUP;
  const uint8_t* row = block + shape.up_values + n * row_bytes;
  const uint8_t* scale = block + shape.up_scales + n * scale_bytes;
  // At the end of a tile the hint falls on rows in hand, which is free; the next tile may be another core's.
  const int64_t ahead = (n + COUNT) * row_bytes + AHEAD_BYTES <= last_row * row_bytes ? AHEAD_BYTES : 0;
  Reg sum[TOKENS][COUNT];
  for (int t = 0; t < TOKENS; t++)
    for (int r = 0; r < COUNT; r++) sum[t][r] = V::zero();
  for (int k = 0; k < shape.latent; k += 2 * CHUNK) {
    for (int r = 0; r < COUNT; r++) {
      const uint8_t* codes = row + r * row_bytes + k / 2;
      for (int line = 0; line < 2 * V::BYTES; line += 64) V::prefetch(codes + line + ahead);
      const Reg scales = V::scales(scale + r * scale_bytes + k / GROUP);
      const Reg later = V::right64<32>(scales);
      Reg even, odd;
      decode(V::load(codes), even, odd);
      for (int t = 0; t < TOKENS; t++)
        sum[t][r] = accumulate(sum[t][r], dots(even, odd, inputs[t], k / 2), scales);
      decode(V::load(codes + V::BYTES), even, odd);
      for (int t = 0; t < TOKENS; t++)
        sum[t][r] = accumulate(sum[t][r], dots(even, odd, inputs[t], k / 2 + V::BYTES), later);
    }
  }
  for (int r = 0; r < COUNT; r++) V::prefetch(scale + r * scale_bytes + ahead / 8);
  for (int t = 0; t < TOKENS; t++)
    for (int r = 0; r < COUNT; r++) sums[int64_t(t) * stride + r] = V::total64(sum[t][r]);
}

template <int TOKENS>
void up_tile(const Shape& shape, const uint8_t* block, const Input* inputs, int begin, int end, int64_t* sums) {
  int n = begin;
  for (; n + ROWS <= end; n += ROWS)
    up_rows<TOKENS, ROWS>(shape, block, inputs, n, end, sums + n - begin, end - begin);
  for (; n < end; n++) up_rows<TOKENS, 1>(shape, block, inputs, n, end, sums + n - begin, end - begin);
}

void up(const Shape& shape, const uint8_t* block, const Input* inputs, int tokens, int begin, int end, int64_t* sums) {
  switch (tokens) {
    case 1: return up_tile<1>(shape, block, inputs, begin, end, sums);
    case 2: return up_tile<2>(shape, block, inputs, begin, end, sums);
    case 3: return up_tile<3>(shape, block, inputs, begin, end, sums);
    default: return up_tile<4>(shape, block, inputs, begin, end, sums);
  }
}

// A chunk of outputs lives in four quarters: even outputs 0-15 and 16-31 of every 32, then odd ones, as unpacking bytes
// within 128-bit lanes leaves them. A quarter's 16-bit lanes widen to two vectors of int32, those to two of int64 each.
struct Quarters {
  Reg of[4];
};

// The codes of two rows, interleaved so that one 16-bit multiply-add serves both.
inline Quarters decode_pair(const uint8_t* a, const uint8_t* b) {
  Reg even_a, odd_a, even_b, odd_b;
  decode(V::load(a), even_a, odd_a);
  decode(V::load(b), even_b, odd_b);
  return {{V::unpack_low8(even_a, even_b), V::unpack_high8(even_a, even_b), V::unpack_low8(odd_a, odd_b),
           V::unpack_high8(odd_a, odd_b)}};
}

// The integer scales of a chunk as int32, in the order in which the quarters widen: of[2q], of[2q+1] belong to quarter q.
struct ChunkScales {
  Reg of[8];
};

// `left` is how many there are: the last group's may end where the block ends.
inline ChunkScales decode_scales(const uint8_t* codes, int left) {
  uint8_t padded[CHUNK];
  if (left < CHUNK) {
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, codes, size_t(left));
    codes = padded;
  }
  ChunkScales scales;
  Reg halves[2];
  V::load_halves(codes, halves[0], halves[1]);
  for (int half = 0; half < 2; half++) {
    // exponent e -> shift max(e - 1, 0); mantissa m -> m + 8 if e > 0. Codes are not negative.
    const Reg exponent = V::both(V::right16<3>(halves[half]), V::set8(15));
    const Reg shift = V::subtract_floor8(exponent, V::set8(1));
    const Reg hidden = V::both(V::left16<3>(V::smaller8(exponent, V::set8(1))), V::set8(8));
    const Reg mantissa = V::add8(V::both(halves[half], V::set8(7)), hidden);
    for (int odd = 0; odd < 2; odd++) {
      const Reg low = V::set16(255);
      const Reg m = odd ? V::right16<8>(mantissa) : V::both(mantissa, low);
      const Reg s = odd ? V::right16<8>(shift) : V::both(shift, low);
      const int quarter = 2 * odd + half;
      scales.of[2 * quarter] = V::shift32(V::unpack_low16(m, V::zero()), V::unpack_low16(s, V::zero()));
      scales.of[2 * quarter + 1] = V::shift32(V::unpack_high16(m, V::zero()), V::unpack_high16(s, V::zero()));
    }
  }
  return scales;
}

struct ChunkSums {
  Reg of[16];
};

// A pair of rows' values for one token, bytes interleaved as the rows' codes are: value = low + 256 * high.
struct PairValues {
  Reg low, high;
};

inline PairValues pair_values(int a, int b) {
  return {V::set16(int16_t((a & 255) | (b & 255) << 8)), V::set16(int16_t(a >> 8 | (b >> 8) << 8))};
}

// One quarter's dot products with a group of up to 16 rows, as two vectors of int32.
inline void quarter_dots(const Quarters* pairs, const PairValues* values, int count, int q, Reg& first, Reg& second) {
  const Reg weights = V::set32(1 | 256 << 16);
  Reg low = V::multiply_add8(values[0].low, pairs[0].of[q]), high = V::multiply_add8(values[0].high, pairs[0].of[q]);
  if (count == 1) {  // most groups: one or two neurons live
    first = V::multiply_add16(V::unpack_low16(low, high), weights);
    second = V::multiply_add16(V::unpack_high16(low, high), weights);
    return;
  }
  first = second = V::zero();
  for (int p = 1;; p++) {
    if (p == count || p % 4 == 0) {  // the products of four pairs fit int16: 8 * 255 * 12 < 2^15
      first = V::add32(first, V::multiply_add16(V::unpack_low16(low, high), weights));
      second = V::add32(second, V::multiply_add16(V::unpack_high16(low, high), weights));
      if (p == count) return;
      low = high = V::zero();
    }
    low = V::add16(low, V::multiply_add8(values[p].low, pairs[p].of[q]));
    high = V::add16(high, V::multiply_add8(values[p].high, pairs[p].of[q]));
  }
}

// Adds a group's contribution for one token to a chunk: its dot products times the scales.
inline void add_group(ChunkSums& sums, const Quarters* pairs, const PairValues* values, int count,
                      const ChunkScales& scales) {
  for (int q = 0; q < 4; q++) {
    Reg dots[2];
    quarter_dots(pairs, values, count, q, dots[0], dots[1]);
    for (int half = 0; half < 2; half++) {
      const Reg scale = scales.of[2 * q + half];
      Reg* sum = sums.of + 4 * q + 2 * half;
      sum[0] = V::add64(sum[0], V::multiply32(dots[half], scale));
      sum[1] = V::add64(sum[1], V::multiply32(V::right64<32>(dots[half]), V::right64<32>(scale)));
    }
  }
}

// Writes a chunk's sums in the order of outputs; outputs from `limit` on are past the tile.
inline void store_chunk(const ChunkSums& sums, int64_t* out, int limit) {
  alignas(64) int64_t lanes[V::BYTES / 8];
  for (int at = 0; at < 16; at++) {
    V::store(lanes, sums.of[at]);
    const int quarter = at / 4, half = at / 2 % 2, odd = at % 2;
    for (int i = 0; i < V::BYTES / 8; i++) {
      const int lane = i / 2, position = 4 * half + 2 * (i % 2) + odd;
      const int output = 32 * lane + 16 * (quarter % 2) + quarter / 2 + 2 * position;
      if (output < limit) out[output] = lanes[i];
    }
  }
}

// Asks for a strip's part of alive row `at`, and of its group's scales if the row is the first of its group.
inline void ask_for(const Shape& shape, const uint8_t* block, const Alive& alive, int at, int first, int columns) {
  const uint8_t* row = block + shape.down_values + alive.rows[at] * shape.row_bytes() + first / 2;
  for (int byte = 0; byte < columns / 2; byte += 64) V::prefetch(row + byte);
  const int group = alive.rows[at] / GROUP;
  if (at && alive.rows[at - 1] / GROUP == group) return;
  const uint8_t* scales = block + shape.down_scales + int64_t(group) * shape.latent + first;
  for (int byte = 0; byte < columns; byte += 64) V::prefetch(scales + byte);
}

// Outputs of `down` at a time: as long a piece of a row as leaves all sums in the nearest cache.
template <int TOKENS>
constexpr int STRIP = TOKENS <= 2 ? 1024 : 512;

// Outputs first <= j < end, at most a strip. Groups outside, chunks inside: what a group needs is prepared once.
template <int TOKENS>
void down_strip(const Shape& shape, const uint8_t* block, const Alive& alive, int first, int end, int64_t* sums,
                int stride) {
  const int64_t row_bytes = shape.row_bytes();
  const uint8_t* rows = block + shape.down_values + first / 2;
  const int chunks = (end - first + CHUNK - 1) / CHUNK;
  ChunkSums total[TOKENS][STRIP<TOKENS> / CHUNK];
  for (auto& token : total)
    for (int c = 0; c < chunks; c++)
      for (auto& sum : token[c].of) sum = V::zero();
  for (int at = 0; at < AHEAD_ROWS && at < alive.count; at++) ask_for(shape, block, alive, at, first, end - first);
  for (int at = 0, next; at < alive.count; at = next) {
    const int group = alive.rows[at] / GROUP;
    for (next = at; next < alive.count && alive.rows[next] / GROUP == group; next++)
      if (next + AHEAD_ROWS < alive.count) ask_for(shape, block, alive, next + AHEAD_ROWS, first, end - first);
    const int count = (next - at + 1) / 2;
    PairValues values[TOKENS][PAIRS];
    bool any[TOKENS];
    for (int t = 0; t < TOKENS; t++) {
      const int16_t* of_token = alive.values[t];
      int all = 0;
      for (int p = 0; p < count; p++) {
        const int a = of_token[at + 2 * p], b = at + 2 * p + 1 < next ? of_token[at + 2 * p + 1] : 0;
        values[t][p] = pair_values(a, b);
        all |= a | b;
      }
      any[t] = all != 0;
    }
    const uint8_t* codes = block + shape.down_scales + int64_t(group) * shape.latent + first;
    for (int c = 0; c < chunks; c++) {
      Quarters pairs[PAIRS];
      for (int p = 0; p < count; p++) {
        const uint8_t* a = rows + alive.rows[at + 2 * p] * row_bytes + c * V::BYTES;
        const uint8_t* b = at + 2 * p + 1 < next ? rows + alive.rows[at + 2 * p + 1] * row_bytes + c * V::BYTES : a;
        pairs[p] = decode_pair(a, b);
      }
      const ChunkScales scales = decode_scales(codes + c * CHUNK, shape.latent - first - c * CHUNK);
      for (int t = 0; t < TOKENS; t++)
        if (any[t]) add_group(total[t][c], pairs, values[t], count, scales);
    }
  }
  for (int t = 0; t < TOKENS; t++)
    for (int c = 0; c < chunks; c++)
      store_chunk(total[t][c], sums + int64_t(t) * stride + c * CHUNK, end - first - c * CHUNK);
}

template <int TOKENS>
void down_tile(const Shape& shape, const uint8_t* block, const Alive& alive, int begin, int end, int64_t* sums) {
  for (int first = begin; first < end; first += STRIP<TOKENS>) {
    const int limit = first + STRIP<TOKENS> < end ? first + STRIP<TOKENS> : end;
    down_strip<TOKENS>(shape, block, alive, first, limit, sums + first - begin, end - begin);
  }
}

void down(const Shape& shape, const uint8_t* block, const Alive& alive, int tokens, int begin, int end, int64_t* sums) {
  switch (tokens) {
    case 1: return down_tile<1>(shape, block, alive, begin, end, sums);
    case 2: return down_tile<2>(shape, block, alive, begin, end, sums);
    case 3: return down_tile<3>(shape, block, alive, begin, end, sums);
    default: return down_tile<4>(shape, block, alive, begin, end, sums);
  }
}

}  // namespace
}  // namespace thimble
