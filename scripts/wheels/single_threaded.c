// glibc 2.32 and newer have this variable, and libstdc++ reads it; older ones lack it. 0 says that
// there may be other threads, so that reference counts stay atomic.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
