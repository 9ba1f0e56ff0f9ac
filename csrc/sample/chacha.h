// The ChaCha20 block function of RFC 8439, and the words taken from it.
//
// A stream has a 256-bit key, a nonce (64-bit call counter, then 32-bit lane) and a 32-bit block
// counter. No two calls use the same (key, call counter). Lanes separate the rows of one call.
#pragma once

#include <cstdint>

#include "common/config.h"

ADAPMIXED_CORE_BEGIN

// Templates over W: one 32-bit word, or the same word of several blocks (sample/cpu.cpp).
template <class W>
ADAPMIXED_HD W rotate_left(W x, int n) {
  return (x << n) | (x >> (32 - n));
}

template <class W>
ADAPMIXED_HD void quarter_round(W* s, int a, int b, int c, int d) {
  s[a] += s[b], s[d] = rotate_left(s[d] ^ s[a], 16);
  s[c] += s[d], s[b] = rotate_left(s[b] ^ s[c], 12);
  s[a] += s[b], s[d] = rotate_left(s[d] ^ s[a], 8);
  s[c] += s[d], s[b] = rotate_left(s[b] ^ s[c], 7);
}

// The 20 rounds, in place.
template <class W>
ADAPMIXED_HD void chacha20_rounds(W* s) {
  for (int round = 0; round < 10; ++round) {
    quarter_round(s, 0, 4, 8, 12);
    quarter_round(s, 1, 5, 9, 13);
    quarter_round(s, 2, 6, 10, 14);
    quarter_round(s, 3, 7, 11, 15);
    quarter_round(s, 0, 5, 10, 15);
    quarter_round(s, 1, 6, 11, 12);
    quarter_round(s, 2, 7, 8, 13);
    quarter_round(s, 3, 4, 9, 14);
  }
}

ADAPMIXED_HD std::uint32_t little_endian(const std::uint8_t* p) {
  return static_cast<std::uint32_t>(p[0]) | static_cast<std::uint32_t>(p[1]) << 8 |
         static_cast<std::uint32_t>(p[2]) << 16 | static_cast<std::uint32_t>(p[3]) << 24;
}

// The constants and the key: words 0 to 11 of every block.
ADAPMIXED_HD void chacha20_key_words(const std::uint8_t* key, std::uint32_t* out) {
  out[0] = 0x61707865, out[1] = 0x3320646e, out[2] = 0x79622d32, out[3] = 0x6b206574;
  for (int i = 0; i < 8; ++i) out[4 + i] = little_endian(key + 4 * i);
}

// RFC 8439, section 2.3: out[16] is the keystream block as little-endian words.
ADAPMIXED_HD void chacha20_block(const std::uint8_t* key, const std::uint32_t nonce[3],
                                 std::uint32_t block, std::uint32_t* out) {
  std::uint32_t start[16];
  chacha20_key_words(key, start);
  start[12] = block;
  for (int i = 0; i < 3; ++i) start[13 + i] = nonce[i];
  for (int i = 0; i < 16; ++i) out[i] = start[i];
  chacha20_rounds(out);
  for (int i = 0; i < 16; ++i) out[i] += start[i];
}

// The 64-bit words of one lane, eight in a block.
struct Stream {
  const std::uint8_t* key;
  std::uint64_t counter;
  std::uint32_t lane;

  ADAPMIXED_HD void block(std::uint32_t index, std::uint64_t* words) const {
    const std::uint32_t nonce[3] = {static_cast<std::uint32_t>(counter),
                                    static_cast<std::uint32_t>(counter >> 32), lane};
    std::uint32_t out[16];
    chacha20_block(key, nonce, index, out);
    for (int i = 0; i < 8; ++i) {
      words[i] = static_cast<std::uint64_t>(out[2 * i]) | static_cast<std::uint64_t>(out[2 * i + 1])
                                                              << 32;
    }
  }
};

ADAPMIXED_CORE_END
