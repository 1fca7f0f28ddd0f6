// IEEE float16: [32 k][16 n], 1 KiB. Values are finite: encoding refuses others.
#pragma once
#include "../expand.h"

namespace fs::weights {

struct f16 : PlainTiles<uint16_t> {
  static vf row(Tile tile, int k) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + k * 16)));
#elif defined(__F16C__)
    const __m128i* p = reinterpret_cast<const __m128i*>(tile + k * 16);
    __m256 halves[2] = {_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128(p + 1))};
    return load<vf>(halves);
#else
    // The exponent's bias goes from 15 to 127. A subnormal is given an exponent of 113 and has 2^-14 taken off again.
    vu h = __builtin_convertvector(load<vh>(tile + k * 16), vu);
    vu magnitude = (h & 0x7fffu) << 13, sign = (h & 0x8000u) << 16;
    vf subnormal = as_f(magnitude + (113u << 23)) - as_f(vu{} + (113u << 23));
    vf value = select((vi)(magnitude < (1u << 23)), subnormal, as_f(magnitude + (112u << 23)));
    return as_f(as_u(value) | sign);
#endif
  }
};

}  // namespace fs::weights
