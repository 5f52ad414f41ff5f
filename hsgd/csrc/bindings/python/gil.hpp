// ReleasedGil: releases Python's global interpreter lock around calls that wait.
//
// A thread that wants the GIL while the interpreter ends stops forever, as it does from Python 3.14
// on. Earlier versions end the thread with pthread_exit(); its unwinding reaches noexcept C++
// frames, and the process aborts.
#ifndef HSGD_BINDINGS_PYTHON_GIL_HPP_
#define HSGD_BINDINGS_PYTHON_GIL_HPP_

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace hsgd::python {

// Calls `take`; never returns if the interpreter ends meanwhile.
template <class Take>
void take_gil(Take&& take) {
#ifdef __GLIBCXX__
  try {
    take();
  } catch (abi::__forced_unwind&) {
    for (;;) ::pause();  // until the process ends, soon
  }
#else
  take();
#endif
}

// Releases the GIL while it exists.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() {
    take_gil([&] { PyEval_RestoreThread(state_); });
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace hsgd::python

#endif  // HSGD_BINDINGS_PYTHON_GIL_HPP_
