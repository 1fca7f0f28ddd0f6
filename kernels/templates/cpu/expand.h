// Weight tiles of any format as the operand of a product: 32 k by 16 n, a row of 16 values for each k.
//
// A format W stands in weights/W.h and has
//   W::Tile                     what points to a tile
//   W::tile(panel, k)           the k-th tile of a panel (all k of one column block)
//   W::panel_bytes(tiles)       size of a panel
//   W::row<N>(tile, k, lane)    N values of row k from `lane` on, exactly, as floats: a register's worth
// Everything else follows from `row`. Where values are not bfloat16's they are rounded to it, as they would have been
// at compile time: a program's bits do not depend on how its weights are stored.
#pragma once
#include "simd.h"

namespace fs {

constexpr int kTileK = 32, kTileN = 16, kTileElems = kTileK * kTileN;

// A format of one number an element: tiles of kTileElems numbers.
template <class T>
struct PlainTiles {
  using Tile = const T*;
  static constexpr size_t panel_bytes(int tiles) { return size_t(tiles) * kTileElems * sizeof(T); }
  static Tile tile(const char* panel, int k) { return reinterpret_cast<Tile>(panel) + size_t(k) * kTileElems; }
};

}  // namespace fs

#include "weights/bf16.h"
#include "weights/f32.h"

namespace fs {

// A tile of format W in element type E, a register from `lane` on at a time: `row` k for float, `pair` (rows 2p and
// 2p + 1) for bfloat16. And `one` element.
template <class E, class W>
struct Expand;

template <class W>
struct Expand<float, W> {
  using Tile = typename W::Tile;
  static vr row(Tile tile, int k, int lane) { return W::template row<kRegisterLanes>(tile, k, lane); }
  static float one(Tile tile, int k, int lane) {
    return row(tile, k, lane / kRegisterLanes * kRegisterLanes)[lane % kRegisterLanes];
  }
};
template <>
struct Expand<float, weights::f32> {
  static vr row(const float* tile, int k, int lane) { return weights::f32::row<kRegisterLanes>(tile, k, lane); }
  static float one(const float* tile, int k, int lane) { return tile[k * 16 + lane]; }
};

template <class W>
struct Expand<bf16, W> {
  using Tile = typename W::Tile;
  static void pair(Tile tile, int p, int lane, vr& lo, vr& hi) {
    lo = rounded(tile, 2 * p, lane), hi = rounded(tile, 2 * p + 1, lane);
  }
  static float one(Tile tile, int k, int lane) {
    return rounded(tile, k, lane / kRegisterLanes * kRegisterLanes)[lane % kRegisterLanes];
  }
  // The whole tile as bfloat16 stores it.
  static void copy(Tile tile, bf16* out) {
    for (int p = 0; p < kTileK / 2; p++)
      for (int lane = 0; lane < 16; lane += kRegisterLanes) {
        vr lo, hi;
        pair(tile, p, lane, lo, hi);
        store(out + p * 32 + lane * 2, (vur)hi | ((vur)lo >> 16));
      }
  }

 private:
  static vr rounded(Tile tile, int k, int lane) {
    vur u = (vur)W::template row<kRegisterLanes>(tile, k, lane);
    return (vr)((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
  }
};
template <>
struct Expand<bf16, weights::bf16> {
  static void pair(const bf16* tile, int p, int lane, vr& lo, vr& hi) {
    vur w = load<vur>(tile + p * 32 + lane * 2);
    lo = (vr)(w << 16), hi = (vr)(w & 0xffff0000u);
  }
  static float one(const bf16* tile, int k, int lane) { return bf16_to_f32(tile[k / 2 * 32 + lane * 2 + k % 2]); }
};

// The format that stores E as it is; KV caches are tiles of it.
template <class E>
struct PlainFormat {
  using type = weights::f32;
};
template <>
struct PlainFormat<bf16> {
  using type = weights::bf16;
};

}  // namespace fs
