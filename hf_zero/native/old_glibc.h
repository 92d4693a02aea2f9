// Included before every source where CMake is given HF_ZERO_OLD_GLIBC, for a wheel. The compiler asks for functions in
// the newest versions that this system's glibc and libstdc++ have; here they are asked for as of 2018 (glibc 2.28, GCC 8),
// so that the library loads wherever torch's own wheels do: manylinux_2_28. The script that builds the wheel checks it.
//
// libstdc++ is not linked statically instead: late_threads.cpp sets the terminate handler of the one that torch uses.
#pragma once

#if defined(__x86_64__) && defined(__linux__)
#include <exception>
#include <new>
#include <string>  // defines the macros of libstdc++

#ifdef __GLIBCXX__
#define HZ_VERSION(name, version) __asm__(".symver " #name ", " #name "@" #version)
HZ_VERSION(pow, GLIBC_2.2.5);
HZ_VERSION(pthread_create, GLIBC_2.2.5);
HZ_VERSION(pthread_once, GLIBC_2.2.5);
HZ_VERSION(pthread_sigmask, GLIBC_2.2.5);
HZ_VERSION(_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, GLIBCXX_3.4.11);
#undef HZ_VERSION

#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT  // glibc 2.30

// glibc 2.32. "There are several threads" is never wrong.
extern "C" {
__attribute__((weak, visibility("hidden"))) char __libc_single_threaded = 0;
}

// GCC 11. The only exception that this library holds is one that late_threads.cpp finds, and then the process ends.
namespace std {
__attribute__((weak)) void __throw_bad_array_new_length() { throw bad_array_new_length(); }
__attribute__((weak)) void __exception_ptr::exception_ptr::_M_release() noexcept {}
}  // namespace std
#endif
#endif
