// Defines functions under MPI's names that only pass a call on: one load and one jump.
//
// Uses no prototypes of mpi.h: each argument is an integer or an address of at most one machine
// word and is passed on unchanged, so that one template serves all functions. Their C++ names
// differ from MPI's, because mpi.h is included for its version. Only functions of this MPI are
// defined: a program that looks for a function by name, as mpi4py does, must not find one that this
// MPI lacks.
#ifndef HSGD_BINDINGS_MPI_PRELOAD_FORWARD_HPP_
#define HSGD_BINDINGS_MPI_PRELOAD_FORWARD_HPP_

#include <atomic>
#include <cstdint>

#include "hsgd_core.h"

using Word = uintptr_t;
static_assert(sizeof(Word) == sizeof(int64_t), "MPI_Count takes one word");

#define HSGD_WORDS_1(a) a##1
#define HSGD_WORDS_2(a) a##1, a##2
#define HSGD_WORDS_3(a) HSGD_WORDS_2(a), a##3
#define HSGD_WORDS_4(a) HSGD_WORDS_3(a), a##4
#define HSGD_WORDS_5(a) HSGD_WORDS_4(a), a##5
#define HSGD_WORDS_6(a) HSGD_WORDS_5(a), a##6
#define HSGD_WORDS_7(a) HSGD_WORDS_6(a), a##7
#define HSGD_WORDS_8(a) HSGD_WORDS_7(a), a##8
#define HSGD_WORDS_9(a) HSGD_WORDS_8(a), a##9
#define HSGD_WORDS_10(a) HSGD_WORDS_9(a), a##10
#define HSGD_WORDS_12(a) HSGD_WORDS_10(a), a##11, a##12

// Defines `name` with `count` arguments. The first call runs first_NAME, which gets the address for
// all later ones from `target`. Release pairs with acquire: a reader of the address also sees
// everything written before it was found. Threads that call at once get the same address.
#define HSGD_FORWARD(name, count, target)                                                 \
  extern "C" HSGD_API int hsgd_forward_##name(HSGD_WORDS_##count(Word w)) __asm__(#name); \
  static int first_##name(HSGD_WORDS_##count(Word w));                                    \
  static std::atomic<decltype(&first_##name)> target_of_##name{first_##name};             \
  static int first_##name(HSGD_WORDS_##count(Word w)) {                                   \
    const auto found = reinterpret_cast<decltype(&first_##name)>(target);                 \
    target_of_##name.store(found, std::memory_order_release);                             \
    return found(HSGD_WORDS_##count(w));                                                  \
  }                                                                                       \
  extern "C" int hsgd_forward_##name(HSGD_WORDS_##count(Word w)) {                        \
    return target_of_##name.load(std::memory_order_acquire)(HSGD_WORDS_##count(w));       \
  }

#endif  // HSGD_BINDINGS_MPI_PRELOAD_FORWARD_HPP_
