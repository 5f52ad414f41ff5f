// Raises the exceptions of hsgd.errors by status, and holds threads back at the program's end.
#include "bindings/python/errors.hpp"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

namespace hsgd::python {

namespace {

// The thread that ends the program; 0: none. Other threads read it after they have failed, and they
// fail only because of actions after the store; it orders nothing else.
std::atomic<unsigned long> ending_thread{0};

// Holds a failed thread back at the program's end. Threads that no thread joins may fail then, and
// Python aborts the process if the interpreter ends while such a thread writes its error to stderr.
// They stay here until the process has ended, or for a time that a later join can tolerate.
void hold_back() {
  constexpr std::chrono::seconds kHeld(2);
  const unsigned long ending = ending_thread.load();
  if (ending == 0 || ending == PyThread_get_thread_ident()) return;
  const ReleasedGil released;
  std::this_thread::sleep_for(kHeld);
}

const char* class_of(int code) {
  switch (code) {
    case HSGD_ERR_PEER_LOST:
      return "PeerLost";
    case HSGD_ERR_TIMEOUT:
      return "CollectiveTimeout";
    case HSGD_ERR_SIGNATURE:
      return "SignatureMismatch";
    case HSGD_ERR_MEMORY:
      return "SharedMemoryError";
    case HSGD_ERR_QUEUE_FULL:
      return "QueueFull";
    default:
      return "HsgdError";
  }
}

nb::object name_of(const hsgd_side& side) {
  return side.named != 0 ? decoded(side.name) : nb::object(nb::none());
}

// Shows an error to the observers before it is raised; it does not change.
void show_to_observers(int status, const nb::object& exception) {
  if (status != HSGD_ERR_PEER_LOST && status != HSGD_ERR_TIMEOUT) return;
  if (PyErr_Occurred() != nullptr) return;
  try {
    for (const nb::handle observer : nb::module_::import_("hsgd.errors").attr("observers")) {
      observer(exception);
    }
  } catch (const nb::python_error&) {
  }
}

}  // namespace

nb::object decoded(const char* text) {
  return nb::steal(
      PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(std::strlen(text)), "replace"));
}

void raise_on_error(int status, const hsgd_error& error) {
  if (status == HSGD_OK) return;
  hold_back();
  const nb::object message = decoded(error.message);
  if (status == HSGD_ERR_INTERRUPTED && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (status == HSGD_ERR_ARGUMENT) {
    PyErr_SetObject(PyExc_ValueError, message.ptr());
    throw nb::python_error();
  }
  const nb::object type = nb::module_::import_("hsgd.errors").attr(class_of(status));
  const nb::object exception = type(message);
  exception.attr("rank") = error.rank;
  if (status == HSGD_ERR_SIGNATURE) {
    const auto& [one, other] = error.sides;
    exception.attr("ranks") = nb::make_tuple(one.rank, other.rank);
    exception.attr("names") = nb::make_tuple(name_of(one), name_of(other));
  }
  show_to_observers(status, exception);
  PyErr_SetObject(type.ptr(), exception.ptr());
  throw nb::python_error();
}

void raise_closed(const char* what) {
  hsgd_error error{};
  report(&error, HSGD_ERR_CLOSED, -1, (std::string("this ") + what + " is closed").c_str());
  raise_on_error(HSGD_ERR_CLOSED, error);
  std::abort();  // not reached: it has thrown
}

void end_program() { ending_thread.store(PyThread_get_thread_ident()); }

int python_interrupted() {
  PyGILState_STATE state{};
  take_gil([&] { state = PyGILState_Ensure(); });
  const int raised = PyErr_CheckSignals();
  PyGILState_Release(state);
  return raised;
}

}  // namespace hsgd::python
