// Reads of memory that nothing wrote: in the workspace, which is undefined when a call begins, and
// in shared memory, which is undefined when a block begins.
//
// g++ compiles the kernels with -fsanitize=thread, which calls a function before every load and
// store (CMakeLists.txt). unwritten.cpp defines these functions in place of ThreadSanitizer's.
// There is a mark for each byte of such memory. A store sets it; a load of a byte without it ends
// the launch with an error, even if the value is never used. In a copy of more than 16 bytes, which
// may have padding, a word of 8 bytes counts only if nothing wrote any of it. Calls of memcpy with
// more than 16 bytes are not seen.
#pragma once

#include <cstddef>

namespace simt {

enum class Memory { workspace, dynamic_shared, static_shared };

// Declares all of this memory unwritten, in place of what was declared before. The memory stays the
// caller's.
void declare_unwritten(Memory kind, const void* begin, std::size_t bytes);

// What is called when a block begins and ends: only kernels are watched.
void watch_block(const void* dynamic, std::size_t bytes);
void watch_nothing();

}  // namespace simt
