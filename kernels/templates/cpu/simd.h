// Portable 16-lane vectors and element types. GCC vector extensions lower them to AVX-512, AVX2, SSE or NEON, so one
// source serves every instruction set; only tile.h has a special path (AMX).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__x86_64__)
#include <xmmintrin.h>  // <immintrin.h> takes longer to compile than a small model
#endif

namespace fs {

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

// What one register holds. GCC keeps wider vectors in memory, so the inner loop of products works on registers of these.
#if defined(__AVX512F__)
constexpr int kRegisterLanes = 16;
#elif defined(__AVX2__)
constexpr int kRegisterLanes = 8;
#else
constexpr int kRegisterLanes = 4;
#endif
template <class T, int N>
struct Lanes {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <int N>
using vfN = typename Lanes<float, N>::type;
template <int N>
using vuN = typename Lanes<uint32_t, N>::type;
typedef vfN<kRegisterLanes> vr;
typedef vuN<kRegisterLanes> vur;

using bf16 = uint16_t;  // storage only; arithmetic is float

template <class V, class P>
inline V load(const P* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
template <class V, class P>
inline void store(P* p, V v) { std::memcpy(p, &v, sizeof(V)); }

inline vf splat(float x) { return vf{} + x; }
inline vf as_f(vu x) { return (vf)x; }
inline vu as_u(vf x) { return (vu)x; }
inline float bf16_to_f32(bf16 h) {
  uint32_t u = uint32_t(h) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
// Round to nearest even, as every framework does when it casts float32 to bfloat16.
inline bf16 f32_to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return bf16((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
inline vh to_bf16(vf x) {
#if defined(__AVX512BF16__)
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#endif
  vu u = as_u(x);
  u = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return __builtin_convertvector(u, vh);
}
inline vf from_bf16(vh h) { return as_f(__builtin_convertvector(h, vu) << 16); }

inline vf select(vi mask, vf a, vf b) { return mask ? a : b; }
inline vi select(vi mask, vi a, vi b) { return mask ? a : b; }
#if defined(__AVX512F__)
inline vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
inline vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#else
inline vf vmax(vf a, vf b) { return select(a > b, a, b); }
inline vf vmin(vf a, vf b) { return select(a < b, a, b); }
#endif
inline vf vmax(vf a, float b) { return vmax(a, splat(b)); }
inline vf vmax(float a, vf b) { return vmax(splat(a), b); }
inline vf vmin(vf a, float b) { return vmin(a, splat(b)); }
inline vf vmin(float a, vf b) { return vmin(splat(a), b); }

// Lane reductions with a fixed shape, so that a row's result never depends on how the row was reached.
typedef float vf4 __attribute__((vector_size(16)));
struct Quarters {
  vf4 q[4];
};
inline Quarters quarters(vf v) {
  Quarters a;
  std::memcpy(&a, &v, sizeof(v));
  return a;
}
inline float hsum(vf v) {
  Quarters a = quarters(v);
  vf4 s = (a.q[0] + a.q[2]) + (a.q[1] + a.q[3]);
  return (s[0] + s[2]) + (s[1] + s[3]);
}
inline float hmax(vf v) {
  Quarters a = quarters(v);
  auto most = [](auto x, auto y) { return y > x ? y : x; };
  vf4 m = most(most(a.q[0], a.q[2]), most(a.q[1], a.q[3]));
  return most(most(m[0], m[2]), most(m[1], m[3]));
}

// 2^n * polynomial (Cephes coefficients) for x in [-87, 88], relative error below 2e-7.
inline vf exp_in_range(vf x) {
  vf shifted = x * 1.44269504f + 12582912.0f;  // adds 1.5 * 2^23: the nearest integer lands in the low bits
  vi n = (vi)shifted - 0x4b400000;
  vf nf = shifted - 12582912.0f;
  vf r = x - nf * 0.693359375f;
  r = r + nf * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  return as_f((vu)((vi)p + (n << 23)));
}
inline vf fs_exp(vf x) {
  vf e = exp_in_range(vmin(vmax(x, splat(-87.0f)), splat(88.0f)));
  return select(x < -87.0f, splat(0.0f), e);
}

inline vf exp2_fraction(vf f) {  // 2^f for |f| <= 0.5
  vf p = splat(9.6760467e-3f);
  p = p * f + 5.5922119e-2f;
  p = p * f + 2.4022107e-1f;
  p = p * f + 6.9312102e-1f;
  return p * f + 1.0000001f;
}
// 2^x for |x| < 126 with a relative error below 5e-6: enough for what is rounded to bfloat16 (2^-9) at once.
inline vf exp2_coarse(vf x) {
  vf shifted = x + 12582912.0f;
  vi n = (vi)shifted - 0x4b400000;
  return as_f((vu)((vi)exp2_fraction(x - (shifted - 12582912.0f)) + (n << 23)));
}

// A score that no softmax sees: finite, so that no arithmetic on it makes a NaN.
constexpr float kMasked = -1e30f;

inline vf fs_tanh(vf x) {
  vf e = fs_exp(x * 2.0f);
  vf t = 1.0f - 2.0f / (e + 1.0f);
  return select(x > 20.0f, splat(1.0f), t);
}

// Cephes' logf: x = 2^n * m with m in [sqrt(1/2), sqrt(2)), then a polynomial in m - 1; relative error below 2e-7.
inline vf fs_log(vf x) {
  vi tiny = x < 1.17549435e-38f;  // zero and the subnormal numbers, whose exponent says nothing
  vi bits = (vi)as_u(select(tiny, x * 8388608.0f, x));
  vi n = (bits - 0x3f3504f3) >> 23;
  vf m = as_f((vu)(bits - (n << 23))) - 1.0f;
  vf nf = __builtin_convertvector(n, vf) - select(tiny, splat(23.0f), splat(0.0f));
  vf p = splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  vf y = p * m * (m * m) - nf * 2.12194440e-4f - m * m * 0.5f + m + nf * 0.693359375f;
  y = select(x > 0.0f, y, select(x == 0.0f, splat(-__builtin_inff()), splat(__builtin_nanf(""))));
  return select(x > 3.40282347e38f, x, y);
}

constexpr int round_up(int n, int m) { return (n + m - 1) / m * m; }

// Element types of matrix-product operands: how to read and write 16 of them as floats.
template <class E>
struct Elem;
template <>
struct Elem<float> {
  using Lane = float;  // what one lane of a tile row holds
  static vf get(const float* p) { return load<vf>(p); }
  static void put(float* p, vf v) { store(p, v); }
  // exp(x * scale) for x * scale <= 0; exactly 0 below -87, so that masked lanes add nothing
  static vf softmax_exp(vf x, float scale, float top) {
    vf y = x * scale - top;
    return select(y < -87.0f, splat(0.0f), exp_in_range(vmax(splat(-87.0f), y)));  // NaN stays
  }
  static vf sigmoid(vf x) { return 1.0f / (1.0f + fs_exp(-x)); }
  static float one(const float* p) { return *p; }
  static void put_one(float* p, float v) { *p = v; }
};
template <>
struct Elem<bf16> {
  using Lane = uint32_t;  // a pair of k
  static vf get(const bf16* p) { return from_bf16(load<vh>(p)); }
  static void put(bf16* p, vf v) { store(p, to_bf16(v)); }
  static vf softmax_exp(vf x, float scale, float top) {
    vf y = x * (scale * 1.44269504f) - top * 1.44269504f;
#if defined(__AVX512F__)  // the same polynomial; scalef underflows to zero by itself
    vf n = (vf)_mm512_roundscale_ps((__m512)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (vf)_mm512_scalef_ps((__m512)exp2_fraction(y - n), (__m512)n);
#endif
    return select(y < -125.0f, splat(0.0f), exp2_coarse(vmax(splat(-125.0f), y)));  // NaN stays
  }
  static vf sigmoid(vf x) { return 1.0f / (1.0f + exp2_coarse(vmin(vmax(x * -1.44269504f, splat(-125.0f)), splat(125.0f)))); }
  static float one(const bf16* p) { return bf16_to_f32(*p); }
  static void put_one(bf16* p, float v) { *p = f32_to_bf16(v); }
};

}  // namespace fs
