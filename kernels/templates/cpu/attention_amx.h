// Attention's two products with their operands held in tile registers over the blocks of a row tile.
#pragma once
#include "kv.h"

#if FS_AMX
namespace fs {

// s[rows, 32*blocks] = q K^T. Tiles 0-1 accumulate a block, 2-5 hold q, 6-7 the keys.
template <class Kv, class KeysOf>
inline void amx_scores(const bf16* q, int rows, const KeysOf& keys_of, int blocks, float* s, int lds) {
  constexpr int KB = Kv::DK, ldq = KB * kTileK * 2;
  static_assert(KB >= 1 && KB <= 4);
  amx_config(rows);
  _tile_loadd(2, q, ldq);
  if constexpr (KB > 1) _tile_loadd(3, q + kTileK, ldq);
  if constexpr (KB > 2) _tile_loadd(4, q + 2 * kTileK, ldq);
  if constexpr (KB > 3) _tile_loadd(5, q + 3 * kTileK, ldq);
  for (int b = 0; b < blocks; b++) {
    const bf16* keys = keys_of(b);
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(6, Kv::key_tile(keys, 0, 0), 64);
    _tile_dpbf16ps(0, 2, 6);
    _tile_loadd(7, Kv::key_tile(keys, 1, 0), 64);
    _tile_dpbf16ps(1, 2, 7);
    if constexpr (KB > 1) {
      _tile_loadd(6, Kv::key_tile(keys, 0, 1), 64);
      _tile_dpbf16ps(0, 3, 6);
      _tile_loadd(7, Kv::key_tile(keys, 1, 1), 64);
      _tile_dpbf16ps(1, 3, 7);
    }
    if constexpr (KB > 2) {
      _tile_loadd(6, Kv::key_tile(keys, 0, 2), 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, Kv::key_tile(keys, 1, 2), 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (KB > 3) {
      _tile_loadd(6, Kv::key_tile(keys, 0, 3), 64);
      _tile_dpbf16ps(0, 5, 6);
      _tile_loadd(7, Kv::key_tile(keys, 1, 3), 64);
      _tile_dpbf16ps(1, 5, 7);
    }
    _tile_stored(0, s + b * kPage, lds * 4);
    _tile_stored(1, s + b * kPage + 16, lds * 4);
  }
}

// Accumulators of NB column blocks in tiles 0-3: cleared, one block of 32 positions added (p at ldp), written out.
template <int NB>
inline void amx_zero() {
  _tile_zero(0);
  if constexpr (NB > 1) _tile_zero(1);
  if constexpr (NB > 2) _tile_zero(2);
  if constexpr (NB > 3) _tile_zero(3);
}
template <int NB>
inline void amx_accumulate(const bf16* p, int ldp, const bf16* tiles) {
  _tile_loadd(4, p, ldp * 2);
  _tile_loadd(6, tiles, 64);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (NB > 1) { _tile_loadd(7, tiles + kTileElems, 64); _tile_dpbf16ps(1, 4, 7); }
  if constexpr (NB > 2) { _tile_loadd(6, tiles + 2 * kTileElems, 64); _tile_dpbf16ps(2, 4, 6); }
  if constexpr (NB > 3) { _tile_loadd(7, tiles + 3 * kTileElems, 64); _tile_dpbf16ps(3, 4, 7); }
}
template <int NB>
inline void amx_store(float* o, int ldo) {
  _tile_stored(0, o, ldo * 4);
  if constexpr (NB > 1) _tile_stored(1, o + 16, ldo * 4);
  if constexpr (NB > 2) _tile_stored(2, o + 32, ldo * 4);
  if constexpr (NB > 3) _tile_stored(3, o + 48, ldo * 4);
}

}  // namespace fs
#endif
