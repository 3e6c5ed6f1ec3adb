// Which instruction sets this processor and its operating system offer.
#pragma once

namespace thimble {

enum class Isa : int { plain, avx2, avxvnni, avx512 };  // ascending preference; the numbers are part of the C ABI
constexpr int ISAS = 4;

bool processor_has(Isa);

}  // namespace thimble
