// Python's global interpreter lock around calls that wait.
//
// Owns one rule: a thread that wants the lock while the interpreter ends stays where it is, as it
// does from Python 3.14 on. Earlier ones end the thread with pthread_exit(), whose unwinding meets
// C++ frames that let nothing through, and the process aborts.
#ifndef HSGD_BINDINGS_PYTHON_GIL_HPP_
#define HSGD_BINDINGS_PYTHON_GIL_HPP_

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace hsgd::python {

// Calls `take`; never returns when the interpreter ends meanwhile.
template <class Take>
void take_gil(Take&& take) {
#ifdef __GLIBCXX__
  try {
    take();
  } catch (abi::__forced_unwind&) {
    for (;;) ::pause();  // until the process ends, in a moment
  }
#else
  take();
#endif
}

// Without the lock while it lives.
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
