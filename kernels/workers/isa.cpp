#include "kernels/workers/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>

namespace thimble {
namespace {

struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf leaf(unsigned number, unsigned sub) {
  Leaf l;
  __get_cpuid_count(number, sub, &l.eax, &l.ebx, &l.ecx, &l.edx);
  return l;
}

// Which registers the operating system saves: an instruction set that it does not save cannot be used.
uint64_t saved_registers() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

bool bit(unsigned value, int at) { return value >> at & 1; }

bool ask(Isa isa) {
  if (isa == Isa::plain) return true;
  const Leaf one = leaf(1, 0), seven = leaf(7, 0), more = leaf(7, 1);
  if (!bit(one.ecx, 27)) return false;  // OSXSAVE
  const uint64_t saved = saved_registers();
  const bool avx2 = (saved & 6) == 6 && bit(seven.ebx, 5) && bit(one.ecx, 12) && bit(one.ecx, 29);  // + FMA, F16C
  if (isa == Isa::avx2) return avx2;
  if (isa == Isa::avxvnni) return avx2 && bit(more.eax, 4);
  return avx2 && (saved & 0xE6) == 0xE6 && bit(seven.ebx, 16) && bit(seven.ebx, 17) && bit(seven.ebx, 30) &&
         bit(seven.ebx, 31) && bit(seven.ecx, 11);  // AVX512 F, DQ, BW, VL, VNNI
}

}  // namespace

// Asked once: a virtual machine's host answers for the processor, which takes 20 us.
bool processor_has(Isa isa) {
  static const bool has[ISAS] = {ask(Isa::plain), ask(Isa::avx2), ask(Isa::avxvnni), ask(Isa::avx512)};
  return has[int(isa)];
}

}  // namespace thimble

#else

bool thimble::processor_has(Isa isa) { return isa == Isa::plain; }

#endif
