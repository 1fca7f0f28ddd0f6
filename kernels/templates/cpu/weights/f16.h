// IEEE float16: [32 k][16 n], 1 KiB. Values are finite: encoding refuses others.
#pragma once
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "../expand.h"

namespace fs::weights {

struct f16 : PlainTiles<uint16_t> {
  template <int N>
  static vfN<N> row(Tile tile, int k, int lane) {
    const uint16_t* p = tile + k * 16 + lane;
#if defined(__AVX512F__)
    if constexpr (N == 16) return (vfN<N>)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#endif
#if defined(__F16C__)
    if constexpr (N == 8) return (vfN<N>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
    // The exponent's bias goes from 15 to 127. A subnormal is given an exponent of 113 and has 2^-14 taken off again.
    vuN<N> h = __builtin_convertvector(load<typename Lanes<uint16_t, N>::type>(p), vuN<N>);
    vuN<N> magnitude = (h & 0x7fffu) << 13, sign = (h & 0x8000u) << 16;
    vfN<N> subnormal = (vfN<N>)(magnitude + (113u << 23)) - (vfN<N>)(vuN<N>{} + (113u << 23));
    vfN<N> value = magnitude < (1u << 23) ? subnormal : (vfN<N>)(magnitude + (112u << 23));
    return (vfN<N>)((vuN<N>)value | sign);
  }
};

}  // namespace fs::weights
