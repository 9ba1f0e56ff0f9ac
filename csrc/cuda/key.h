// A key of the generator as an argument of a kernel.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/config.h"

ADAPMIXED_CORE_BEGIN

struct Key {
  std::uint32_t words[8];

  ADAPMIXED_HD const std::uint8_t* bytes() const {
    return reinterpret_cast<const std::uint8_t*>(words);
  }
};

// `bytes`: 32 of them, the host's.
inline Key key_of(const std::uint8_t* bytes) {
  Key key;
  std::memcpy(key.words, bytes, sizeof key.words);
  return key;
}

ADAPMIXED_CORE_END
