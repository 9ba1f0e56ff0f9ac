// Kernels that tests plant faults with.
#pragma once

#include <string>

namespace planted {

// Launches a kernel of two threads in which one reads what nothing wrote; `where` is "workspace",
// "dynamic", "static", "atomic", or "copy" for a copy of many bytes. With "nothing" every value is
// written first.
void read_unwritten(const std::string& where, double* workspace);

}  // namespace planted
