// Filling hsgd_call from Python's arguments, and waiting for a request.
#include "request.hpp"

namespace hsgd::python {

const char* text_of(nb::handle name) {
  if (name.is_none()) return nullptr;
  const char* text = PyUnicode_AsUTF8(name.ptr());
  if (text == nullptr) throw nb::python_error();
  return text;
}

void Collective::set_label(const Array& array, nb::handle name) {
  label_ = {text_of(name), array.shape(), array.ndim()};
  call_.label = &label_;
}

void Collective::allreduce(nb::handle in, nb::handle out, int op, nb::handle name) {
  const Array& source = in_.emplace(in, "allreduce", false);
  const Array& target = out_.emplace(out, "allreduce, out", true);
  if (!source.is_like(target)) {
    throw nb::value_error(
        "allreduce: out has another shape or dtype than the input; pass one like it");
  }
  set_label(source, name);
  call_.kind = HSGD_ALLREDUCE;
  call_.in = source.data();
  call_.out = target.data();
  call_.count = source.count();
  call_.dtype = source.dtype();
  call_.op = static_cast<hsgd_op>(op);
}

void Collective::broadcast(nb::handle data, int root, nb::handle name) {
  const Array& array = out_.emplace(data, "broadcast", true);
  set_label(array, name);
  call_.kind = HSGD_BROADCAST;
  call_.in = call_.out = array.data();
  call_.count = array.count();
  call_.dtype = array.dtype();
  call_.root = root;
}

void Collective::give_arrays_back() {
  in_.reset();
  out_.reset();
}

bool Request::wait(double timeout_s) {
  const std::shared_ptr<Submitted> submitted = submitted_;
  hsgd_error error;
  int status = 0;
  {
    const nb::gil_scoped_release released;
    status = hsgd_request_wait(submitted->request, timeout_s, &error);
  }
  if (status == HSGD_ERR_PENDING) return false;
  // An interrupt has left a Python exception, with which no array's clean-up should run.
  if (status != HSGD_ERR_INTERRUPTED) submitted->collective.give_arrays_back();
  raise_on_error(status, error);
  return true;
}

}  // namespace hsgd::python
