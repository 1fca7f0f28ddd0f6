// The paged KV pool of one layer: per page and kv head the keys as tiles (lanes = 16 keys, k = dims) and the values as
// tiles (lanes = 16 dims, k = the page's 32 tokens). Both are the B operand of tile.h, so nothing is repacked to read.
#pragma once
#include "context.h"

namespace fs {

template <class E, int G, int D>
struct KvLayout {
  static constexpr int DK = round_up(D, kTileK) / kTileK;  // k blocks of a key
  static constexpr int DN = round_up(D, kTileN) / kTileN;  // column blocks of a value
  static constexpr size_t k_elems = size_t(2) * DK * kTileElems, v_elems = size_t(DN) * kTileElems;
  static constexpr size_t head_elems = k_elems + v_elems, page_elems = head_elems * G;
  static constexpr size_t page_bytes = page_elems * sizeof(E);

  static E* keys(E* layer, int page, int g) { return layer + size_t(page) * page_elems + g * head_elems; }
  static E* values(E* layer, int page, int g) { return keys(layer, page, g) + k_elems; }
  static const E* key_tile(const E* keys, int half, int kb) { return keys + (size_t(half) * DK + kb) * kTileElems; }

  // Token i's key: for bf16 one 32-bit pair a tile row, else one float a tile row; rows are 16 lanes apart.
  using Lane = typename Elem<E>::Lane;
  static constexpr int key_rows = DK * (sizeof(E) == 2 ? 16 : 32);
  static Lane* key_lane(E* keys, int i) { return reinterpret_cast<Lane*>(keys + size_t(i / 16) * DK * kTileElems) + i % 16; }
  static const Lane* key_lane(const E* keys, int i) { return key_lane(const_cast<E*>(keys), i); }

  // Token i's value in column block n: for bf16 every second half-word of a 64-byte row, else a row of 16 floats.
  static void put_value(E* values, int i, int n, vf v) {
    E* tile = values + size_t(n) * kTileElems;
    if constexpr (sizeof(E) == 2) {
      // The other half-words may be another thread's token: they must not be read and written back.
      uint16_t* row = tile + i / 2 * 32;
#if defined(__AVX512BW__)
      vu twice = __builtin_convertvector(to_bf16(v), vu) * 0x10001u;
      _mm512_mask_storeu_epi16(row, 0x55555555u << (i % 2), (__m512i)twice);
#else
      vh half = to_bf16(v);
      for (int lane = 0; lane < 16; lane++) row[2 * lane + i % 2] = half[lane];
#endif
    } else {
      store(tile + i * 16, v);
    }
  }
  static vf get_value(const E* values, int i, int n) {
    const E* tile = values + size_t(n) * kTileElems;
    if constexpr (sizeof(E) == 2) {
      vu row = load<vu>(tile + i / 2 * 32);
      return as_f(i % 2 ? row & 0xffff0000u : row << 16);
    } else {
      return load<vf>(tile + i * 16);
    }
  }
  static bool storable(const float* v) {  // whether all of them are finite, also when rounded to E
    vf sum = {};
    for (int n = 0; n < DN; n++) sum = sum + load<vf>(v + n * 16) * 1.01f * 0.0f;
    return hsum(sum) == 0.0f;
  }
  // A value that is not finite is stored as zero under a key of NaN: whoever sees the key gets NaN, while rows that give
  // it no weight (siblings in a tree, the next request in this page) multiply zero by a number.
  static void put(E* layer, int slot, int g, const float* k, const float* v) {
    E *kk = keys(layer, slot / kPage, g), *vv = values(layer, slot / kPage, g);
    alignas(64) E packed[DK * kTileK] = {};
    int d = 0;
    for (; d + 16 <= D; d += 16) Elem<E>::put(packed + d, load<vf>(k + d));
    for (; d < D; d++) Elem<E>::put_one(packed + d, k[d]);
    alignas(64) float padded[DN * 16] = {};
    std::memcpy(padded, v, D * sizeof(float));
    if (!storable(padded)) {
      for (d = 0; d < D; d++) Elem<E>::put_one(packed + d, __builtin_nanf(""));
      std::memset(padded, 0, sizeof(padded));
    }
    const Lane* from = reinterpret_cast<const Lane*>(packed);
    Lane* to = key_lane(kk, slot % kPage);
    for (int row = 0; row < key_rows; row++) to[row * 16] = from[row];
    for (int n = 0; n < DN; n++) put_value(vv, slot % kPage, n, load<vf>(padded + n * 16));
  }
  static void copy_key(const E* from, int i, E* to, int j) {
    const Lane* a = key_lane(from, i);
    Lane* b = key_lane(to, j);
    for (int row = 0; row < key_rows; row++) b[row * 16] = a[row * 16];
  }
  static void copy_value(const E* from, int i, E* to, int j, int n0 = 0, int n1 = DN) {
    for (int n = n0; n < n1; n++) put_value(to, j, n, get_value(from, i, n));
  }
  // commit's gather: slot by slot in order, so overlapping moves to lower slots are safe.
  static void move(E* layer, int n, const int32_t* src, const int32_t* dst) {
    for (int m = 0; m < n; m++) {
      if (src[m] == dst[m]) continue;
      for (int g = 0; g < G; g++) {
        copy_key(keys(layer, src[m] / kPage, g), src[m] % kPage, keys(layer, dst[m] / kPage, g), dst[m] % kPage);
        copy_value(values(layer, src[m] / kPage, g), src[m] % kPage, values(layer, dst[m] / kPage, g), dst[m] % kPage);
      }
    }
  }
};

}  // namespace fs
