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

  // Where element d of token i (0..31) of a page lives.
  static size_t key_at(int i, int d) {
    size_t tile = (size_t(i / 16) * DK + d / 32) * kTileElems;
    return sizeof(E) == 2 ? tile + (d % 32) / 2 * 32 + (i % 16) * 2 + d % 2 : tile + (d % 32) * 16 + i % 16;
  }
  static size_t value_at(int i, int d) {
    size_t tile = size_t(d / 16) * kTileElems;
    return sizeof(E) == 2 ? tile + i / 2 * 32 + (d % 16) * 2 + i % 2 : tile + i * 16 + d % 16;
  }
  static void put(E* layer, int slot, int g, const float* k, const float* v) {
    E *kk = keys(layer, slot / kPage, g), *vv = values(layer, slot / kPage, g);
    for (int d = 0; d < D; d++) Elem<E>::put_one(kk + key_at(slot % kPage, d), k[d]);
    for (int d = 0; d < D; d++) Elem<E>::put_one(vv + value_at(slot % kPage, d), v[d]);
  }
  static void copy_key(const E* from, int i, E* to, int j) {
    for (int d = 0; d < D; d++) to[key_at(j, d)] = from[key_at(i, d)];
  }
  static void copy_value(const E* from, int i, E* to, int j) {
    for (int d = 0; d < D; d++) to[value_at(j, d)] = from[value_at(i, d)];
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
