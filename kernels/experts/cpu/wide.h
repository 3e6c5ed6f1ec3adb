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
constexpr int AHEAD_ROWS = 12;     // the same for alive rows of `down`
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

inline ChunkScales decode_scales(const uint8_t* codes) {
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

// Adds one group's contribution for one token: the pairs' codes times its values, times the scales.
inline void add_group(ChunkSums& sums, const Quarters* pairs, int count, const int16_t* values, int odd_one,
                      const ChunkScales& scales) {
  const Reg weights = V::set32(1 | 256 << 16);
  for (int q = 0; q < 4; q++) {
    Reg first = V::zero(), second = V::zero();
    for (int start = 0; start < count; start += 4) {  // four pairs of products fit int16: 8 * 255 * 12 < 2^15
      Reg low = V::zero(), high = V::zero();
      for (int p = start; p < count && p < start + 4; p++) {
        const int a = values[2 * p], b = 2 * p + 1 < odd_one ? values[2 * p + 1] : 0;
        low = V::add16(low, V::multiply_add8(V::set16(int16_t((a & 255) | (b & 255) << 8)), pairs[p].of[q]));
        high = V::add16(high, V::multiply_add8(V::set16(int16_t(a >> 8 | (b >> 8) << 8)), pairs[p].of[q]));
      }
      first = V::add32(first, V::multiply_add16(V::unpack_low16(low, high), weights));
      second = V::add32(second, V::multiply_add16(V::unpack_high16(low, high), weights));
    }
    const Reg dots[2] = {first, second};
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

template <int TOKENS>
void down_chunk(const Shape& shape, const uint8_t* block, const Alive& alive, int first, int end, int tile_bytes,
                int64_t* sums, int stride) {
  const int64_t row_bytes = shape.row_bytes();
  const uint8_t* rows = block + shape.down_values + first / 2;
  ChunkSums total[TOKENS];
  for (auto& token : total)
    for (auto& sum : token.of) sum = V::zero();
  for (int at = 0; at < alive.count;) {
    const int group = alive.rows[at] / GROUP;
    int next = at + 1;
    while (next < alive.count && alive.rows[next] / GROUP == group) next++;
    if (tile_bytes)  // the first chunk of a tile asks for the whole tile's part of the rows to come
      for (int i = at + AHEAD_ROWS; i < next + AHEAD_ROWS && i < alive.count; i++)
        for (int byte = 0; byte < tile_bytes; byte += 64) V::prefetch(rows + alive.rows[i] * row_bytes + byte);
    if (tile_bytes && next + AHEAD_ROWS < alive.count)
      for (int byte = 0; byte < 2 * tile_bytes; byte += 64)
        V::prefetch(block + shape.down_scales + int64_t(alive.rows[next + AHEAD_ROWS] / GROUP) * shape.latent + first + byte);
    Quarters pairs[PAIRS];
    const int count = (next - at + 1) / 2;
    for (int p = 0; p < count; p++) {
      const uint8_t* a = rows + alive.rows[at + 2 * p] * row_bytes;
      const uint8_t* b = at + 2 * p + 1 < next ? rows + alive.rows[at + 2 * p + 1] * row_bytes : a;
      pairs[p] = decode_pair(a, b);
    }
    const uint8_t* codes = block + shape.down_scales + int64_t(group) * shape.latent + first;
    uint8_t padded[CHUNK];
    if (first + CHUNK > shape.latent) {  // the last group's scales may end where the block ends
      std::memset(padded, 0, sizeof padded);
      std::memcpy(padded, codes, size_t(shape.latent - first));
      codes = padded;
    }
    const ChunkScales scales = decode_scales(codes);
    for (int t = 0; t < TOKENS; t++) {
      int any = TOKENS == 1;
      for (int i = at; i < next && !any; i++) any = alive.values[t][i];
      if (any) add_group(total[t], pairs, count, alive.values[t] + at, next - at, scales);
    }
    at = next;
  }
  for (int t = 0; t < TOKENS; t++) store_chunk(total[t], sums + int64_t(t) * stride, end - first);
}

template <int TOKENS>
void down_tile(const Shape& shape, const uint8_t* block, const Alive& alive, int begin, int end, int64_t* sums) {
  for (int first = begin; first < end; first += CHUNK)
    down_chunk<TOKENS>(shape, block, alive, first, end, first == begin ? (end - begin) / 2 : 0, sums + first - begin,
                       end - begin);
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
